def overlaps(first, second):
    """Whether two stays (first night, day of departure) need the room on the same night. Days are numbers."""
    return first[0] <= second[1] and second[0] <= first[1]


def free_days(stays, begin, end):
    """Nights from `begin` up to the day `end` on which nobody stays."""
    taken = set()
    for arrival, departure in stays:
        taken |= set(range(arrival, departure + 1))
    return len(set(range(begin, end + 1)) - taken)
