VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
PARTS = {
    1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV",
    1: "I",
}


def from_roman(text):
    values = [VALUES[letter] for letter in text]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0]))


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral is {number}")
    text = ""
    for value, letters in PARTS.items():
        count, number = divmod(number, value)
        text += letters * count
    return text
