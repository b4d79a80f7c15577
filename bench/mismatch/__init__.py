"""Constant loads on engines that differ from their reports: does measurement correct the model?"""
