"""The checksum of demo-client --checksum, in plain Python: for small results of numbers, strings, dates and times."""

import pyarrow as pa

MULTIPLIER = 0x9E37_79B9_7F4A_7C15
NULL = 0x6E75_6C6C
WORD = 0xFFFF_FFFF_FFFF_FFFF


def of(batches):
    """The sum of the rows' hashes, so that neither their order nor the batches matter."""
    total = 0
    for batch in batches:
        rows = [0] * batch.num_rows
        for column in batch.columns:
            for row, value in enumerate(values(column)):
                rows[row] = mix(rows[row], NULL if value is None else of_bytes(value))
        total += sum(mix(row, MULTIPLIER) for row in rows)
    return f"{total & WORD:016x}"


def values(column):
    """The bytes of each value, as they are in memory; None for nulls."""
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return [None if value is None else value.encode() if isinstance(value, str) else value for value in column.to_pylist()]
    width = column.type.bit_width // 8
    if pa.types.is_nested(column.type) or pa.types.is_dictionary(column.type) or not width:
        raise TypeError(f"no checksum of {column.type}")
    memory = memoryview(column.buffers()[1])[column.offset * width :]
    return [
        bytes(memory[row * width : (row + 1) * width]) if valid else None
        for row, valid in enumerate(column.is_valid().to_pylist())
    ]


def of_bytes(value):
    total = len(value)
    for start in range(0, len(value), 8):
        total = mix(total, int.from_bytes(value[start : start + 8], "little"))
    return total


def mix(total, word):
    product = ((((total << 23) | (total >> 41)) & WORD) ^ word) * MULTIPLIER & WORD
    return product ^ (product >> 32)
