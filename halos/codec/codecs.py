"""All codecs by the names that manifests and specifications call them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halos.codec.blocks import Even, Quarters
from halos.codec.entropy import Compressed
from halos.codec.plain import Codec, Fp32, Half
from halos.codec.sparse import TopK

PLAIN: tuple[Codec, ...] = (Fp32(), Half("bf16", torch.bfloat16), Half("fp16", torch.float16))
ROUNDING: tuple[Codec, ...] = (Even(8, 256), Even(4, 64), Quarters(128), TopK())
COMPRESSED: tuple[Codec, ...] = tuple([Compressed(codec) for codec in ROUNDING])

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (*PLAIN, *ROUNDING, *COMPRESSED)}
