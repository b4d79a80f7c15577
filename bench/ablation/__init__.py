"""The law without one of its mechanisms at a time: what does each of them earn?"""
