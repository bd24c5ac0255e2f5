"""Export of a model from its mesh, and import into a mesh: Hugging Face's folders, one parameter at a time.

    export    every rank: its shard of a parameter  ->  whole on its stage  ->  rank 0, which writes the file
    import    every rank: a parameter of its stages from the file  ->  its shard

On export, all ranks of a stage hold one whole parameter at a time, and rank 0 holds all weights in host
memory. On import, a rank holds its shards and one whole parameter (hybrid_initial.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from common.data.tokenizer import FromFile, Tokenizer
from common.errors import UsageError
from common.models.huggingface import write_huggingface

from hybrid_model import Hybrid
from hybrid_options import TOKENIZER
from hybrid_pieces import Entry
from hybrid_whole import gather_to_rank_0


def weights_on_rank_0(hybrid: Hybrid) -> dict[str, Tensor]:
    """Gather every parameter whole on rank 0, by its name in the plain model.

    Returns {} on other ranks. All ranks call it.
    """
    return gather_to_rank_0([Entry(name, p, p) for name, p in hybrid.named_parameters()], hybrid.mesh)


def export(hybrid: Hybrid, folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a folder that transformers' from_pretrained reads. Raises UsageError on rank 0 if that fails."""
    weights = weights_on_rank_0(hybrid)
    if hybrid.mesh.world.rank == 0:
        write_huggingface(hybrid.config, weights, folder)
        if isinstance(tokenizer, FromFile):
            write_tokenizer(tokenizer, folder, hybrid.config.sequence)


def write_tokenizer(tokenizer: FromFile, folder: Path, longest: int) -> None:
    """Write the tokenizer as it was read, and what transformers asks beside it. Raises UsageError if that fails."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    end = {} if tokenizer.end is None else {"eos_token": tokenizer.decode([tokenizer.end])}
    try:
        (folder / TOKENIZER).write_bytes(tokenizer.content)
        (folder / "tokenizer_config.json").write_text(json.dumps(about | end, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the tokenizer to {folder}: {error}") from None
