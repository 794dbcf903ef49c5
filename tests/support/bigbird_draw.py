"""The random blocks of BigBird, drawn by a second implementation."""


def drawn(low, high, n, state):
    """Knuth's algorithm S over low .. high - 1, with his generator (MMIX)."""
    found = []
    for b in range(low, high):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        if (state >> 33) % (high - b) < n - len(found):
            found.append(b)
    return found
