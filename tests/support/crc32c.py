"""CRC-32C (RFC 3720, B.4), a table of 256 steps of eight bits."""


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of bytes."""
    found = 0xFFFFFFFF
    for byte in data:
        found = _TABLE[(found ^ byte) & 255] ^ found >> 8
    return found ^ 0xFFFFFFFF
