VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def from_roman(text):
    values = [VALUES[letter] for letter in text]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0]))
