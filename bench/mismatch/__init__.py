"""Constant loads on engines that differ from what Plimsoll is told of them: does measurement correct the model?"""
