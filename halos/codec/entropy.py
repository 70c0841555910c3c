"""The last stage of a codec: what it gives, compressed where that pays."""

from __future__ import annotations

import threading

import zstandard
from torch import Tensor

from halos.codec.plain import Codec, Encoded

LEVEL = 1  # higher ones gain nothing on what rounding leaves, and take longer
SAMPLE = 1 << 14  # bytes from the middle that show whether compression pays
PAYS = 0.97
PLAIN, COMPRESSED = b"\0", b"\1"  # the first byte


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


CONTEXTS = _Contexts()


class Compressed:
    """``inner``, and zstandard where a sample of its bytes shows that this pays."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return f"{self.inner.name}+zstd"

    def size(self, elements: int) -> int:
        """At most so many bytes."""
        return 1 + self.inner.size(elements)

    def fits(self, size: int, elements: int) -> bool:
        return 1 <= size <= self.size(elements)

    def encode(self, values: Tensor) -> Encoded:
        data = memoryview(self.inner.encode(values)).cast("B")
        compress = CONTEXTS.compressor.compress
        middle = max(0, len(data) - SAMPLE) // 2
        sample = data[middle : middle + SAMPLE]
        if len(compress(sample)) < PAYS * len(sample):
            compressed = compress(data)
            if len(compressed) < len(data):
                return COMPRESSED + compressed
        return PLAIN + bytes(data)

    def decode(self, data: Encoded, out: Tensor) -> None:
        """Raises ``ValueError`` for what is not of this form, before memory is taken for it."""
        view, most = memoryview(data).cast("B"), self.inner.size(out.numel())
        if not self.fits(len(view), out.numel()):
            raise ValueError(f"{len(view)} bytes are not {out.numel()} elements in {self.name}")
        if view[:1] == PLAIN:
            self.inner.decode(view[1:], out)
        elif view[:1] == COMPRESSED:
            self.inner.decode(_decompressed(view[1:], most), out)
        else:
            raise ValueError(f"what is said to be {self.name} begins with {view[0]}")


def _decompressed(data: memoryview, most: int) -> bytes:
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise ValueError(f"{size} bytes are announced where {most} are the most")
        return CONTEXTS.decompressor.decompress(data, max_output_size=most)
    except zstandard.ZstdError as error:
        raise ValueError(f"what is said to be compressed is not: {error}") from error
