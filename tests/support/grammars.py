"""Texts against grammars, byte by byte."""

import random

from tamis.grammar.probe import byte_vocabulary, llguidance


def matcher(text):
    """A grammar's matcher over bytes, which tokens of a test follow."""
    found = llguidance().LLMatcher(byte_vocabulary(), text, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def fits(found, text):
    """Whether a whole text is what a matcher allows."""
    copy, data = found.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(data) == len(data) and copy.is_accepting()


def written(found, seed, most=400):
    """A text of random bytes among those allowed; None where it has no end by then."""
    rng, copy, data = random.Random(seed), found.deep_copy(), bytearray()
    for n in range(most):
        mask = copy.compute_bitmask()
        assert not copy.is_error(), copy.get_error()
        allowed = [b for b in range(257) if mask[b // 8] >> (b % 8) & 1]
        assert allowed, bytes(data)
        if 256 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return data.decode()
        allowed = [b for b in allowed if b < 256 and b not in b" \n\t"] or allowed
        ends = [b for b in allowed if b in b'"]}']
        byte = rng.choice(ends if ends and rng.random() < (0.3 if n < 80 else 0.8) else allowed)
        copy.consume_token(byte)
        data.append(byte)
    return None
