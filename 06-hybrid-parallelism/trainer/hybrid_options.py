"""The options of a training run: a configuration file, and the command line over it.

    steps = 300                  # configuration.toml: an option of the command line in each line, without its dashes
    learning-rate = 1e-3
    checkpointing = true

    python train_llama.py --config configuration.toml --steps 10        # the file's options, but 10 steps

Paths in a file are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from common.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from common.errors import UsageError
from common.launch import command_line as options
from common.launch.command_line import Count, Size, Within, check_folder
from common.models.huggingface import read_config
from common.models.transformer import TransformerConfig

from hybrid_balance import Balancing
from hybrid_layout import HybridOptions

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

T = TypeVar("T")
TOKENIZER = "tokenizer.json"  # its name in a folder of Hugging Face's
CountOrNone = Annotated[int, Within(0, 10**9)]
Factor = Annotated[float, Within(0, 1e30)]


@dataclass
class TrainOptions(Balancing, HybridOptions, without=("benchmark", "scaling", "check")):
    """Options of a training run."""

    config: Path | None = None
    """TOML file with options; the command line overrides them."""
    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py."""
    init: Path | None = None
    """Folder with a Hugging Face model to start from, instead of --model."""
    steps: CountOrNone = 100
    """Steps of the whole run, including those before a resume."""
    batch: Size = 16
    """Samples in the global batch; the shares of places along dp and ep differ by one sample at most."""
    sequence: Size = 64
    """Tokens per sample."""
    dtype: Literal["float64", "float32"] = "float32"
    """Type of weights and gradients."""
    tokenizer: Path | None = None
    """tokenizer.json for the text; a --model then has its vocabulary; default: that of --init, if any, else bytes."""
    tokens: Literal["bytes", "uint16", "uint32"] = "bytes"
    """Format of --data: bytes of text, or token numbers of this type; a .npy file states its own type."""
    learning_rate: Factor = 1e-3
    """Largest learning rate; reached after --warm-up steps, then it falls along a cosine."""
    warm_up: CountOrNone = 10
    """Steps in which the learning rate grows."""
    final: Factor = 0.1
    """Learning rate of the last step, as a share of --learning-rate."""
    weight_decay: Factor = 0.1
    """AdamW's weight decay on matrices and embeddings; norms and biases have none."""
    epsilon: Annotated[float, Within(1e-30, 1)] = 1e-5
    """AdamW's epsilon, beside which gradients of a parameter that are smaller count little; 1e-5 as in LLaMA 2."""
    clip: Factor = 1.0
    """Largest norm of the gradient; 0 means no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is not finite: stop all ranks, or skip the step."""
    log_every: Count = 10
    """Steps from one line of numbers to the next."""
    evaluate_every: CountOrNone = 50
    """Steps between evaluations; there is one more at the end. 0 for none."""
    evaluation: Count = 64
    """Samples of the validation text in an evaluation, the same ones every time."""
    generate: CountOrNone = 0
    """Tokens of text to write after each evaluation, and at the end."""
    prompt: str = "def "
    """Beginning of the generated text."""
    temperature: Factor = 0.8
    """Sampling temperature; 0 takes the likeliest token, 1 draws from the model's distribution."""
    checkpoints: Path | None = None
    """Folder for checkpoints, seen by all ranks; the run resumes from its newest good checkpoint."""
    checkpoint_every: Count = 100
    """Steps between checkpoints; there is one more at the end, and when the run is told to stop."""
    keep: Count = 3
    """Number of checkpoints to keep."""
    asynchronous: bool = False
    """Write checkpoints while training goes on."""
    resume: str = "auto"
    """auto: from the newest good checkpoint, if there is one; a file of --save, of any mesh and language: from that, if
    there is no checkpoint; no: begin anew, and the checkpoint folder must be empty."""
    save: Path | None = None
    """File for the whole weights and optimizer states at the end (safetensors), from which also C++ resumes."""
    export: Path | None = None
    """Folder for the trained model in the format of Hugging Face's transformers."""
    tensorboard: Path | None = None
    """Folder for TensorBoard."""
    peak_tflops: Factor | None = None
    """Peak of a rank's device, or its share of a shared one, in 10^12 operations per second, for MFU;
    default: measured by matrix products."""
    trace: Path | None = None
    """Folder for Chrome traces: of this run's third step, and of the next one after a rank gets SIGUSR1."""
    plot: Path | None = None
    """File for a plot of all runs in the --json file, drawn at the end."""
    timeout: Annotated[float, Within(1e-3, 1e6)] = 60.0
    """Longest wait, in seconds, also for writing a checkpoint or --export to the disk."""
    trace_all: ClassVar[bool] = False

    @cached_property
    def coder(self) -> Tokenizer:
        """Tokenizer of the text and of the prompt. Raises UsageError if the file cannot be read."""
        beside = self.init / TOKENIZER if self.init else None
        return load_tokenizer(self.tokenizer or (beside if beside and beside.exists() else None))

    def model_config(self) -> TransformerConfig:
        """Return the model's shape: that of the folder --init, or of the name --model."""
        if self.init:
            return read_config(self.init)
        shape = super().model_config()
        return replace(shape, vocabulary=self.coder.vocabulary) if self.tokenizer else shape

    def look_at_data(self) -> None:
        """No-op: `Shuffled` checks the data, since a token file may be larger than the memory."""

    def validate(self) -> None:
        """Check that the options do not contradict one another. Raises UsageError."""
        super().validate()
        self.check_model()
        if self.balances and not self.model_config().experts:
            raise UsageError(
                f"--balance {self.balance} --z-coefficient {self.z_coefficient:g}: {self.init or self.model} has no "
                f"experts to balance; mixtral-tiny has 8"
            )
        if self.balance == "bias" and self.export:
            raise UsageError(
                "--export: the format has no biases, which --balance bias trains; --save keeps them"
            )
        if self.plot and not self.json:
            raise UsageError(f"--plot {self.plot} draws what is in the --json file; give that, too")
        if self.resume not in ("auto", "no") and not Path(self.resume).is_file():
            raise UsageError(
                f"--resume {self.resume}: there is no such file; give auto, no, or a file of --save"
            )
        self.check_tokenizer()

    def check_model(self) -> None:
        """Check that the model predicts next tokens. Raises UsageError for one that sees them."""
        if not self.model_config().causal:
            raise UsageError(
                f"{self.init or self.model} sees later tokens, so it cannot learn to predict the next one; "
                f"train it with bert_pretraining/pretrain_bert.py"
            )

    def check_tokenizer(self) -> None:
        """Check that the model knows the tokens of the text and of the prompt. Raises UsageError."""
        vocabulary, coder = self.model_config().vocabulary, self.coder
        if isinstance(coder, Bytes):
            if self.export and (self.export / TOKENIZER).exists():
                raise UsageError(
                    f"--export {self.export}: there is a {TOKENIZER}, but this model reads bytes; give another folder"
                )
        elif coder.vocabulary > vocabulary:
            raise UsageError(
                f"the tokenizer {coder.file} has {coder.vocabulary} tokens, the model of --init {self.init} a "
                f"vocabulary of {vocabulary}; give the tokenizer of that model, or one with at most {vocabulary}"
            )
        prompt = coder.encode(self.prompt)
        if self.generate and not (prompt and max(prompt) < vocabulary):
            kind = "is taken as bytes" if isinstance(coder, Bytes) else f"is taken as tokens of {coder.file}"
            raise UsageError(
                f"--prompt {self.prompt!a} {kind}; --generate needs at least one, and a model that "
                f"knows them: its vocabulary is {vocabulary}"
            )

    def make_folders(self) -> None:
        """Check up front that the output paths are writable; create their folders. Raises UsageError."""
        for name in ("checkpoints", "export", "trace", "tensorboard", "plot", "save"):
            target: Path | None = getattr(self, name)
            if target is not None:
                check_folder(name, target, target.absolute().parent if name in ("plot", "save") else target)


def parse(options_type: type[T], description: str | None = None, args: Sequence[str] | None = None) -> T:
    """Return the command line's options over those of its --config file. Raises UsageError for a bad file."""
    given = list(sys.argv[1:] if args is None else args)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path, nargs="?")  # tyro reports a --config without a value
    file = finder.parse_known_args(given)[0].config
    default = from_file(options_type, file) if file else options_type()
    return options.parse(options_type, description, given, default)


def from_file(options_type: type[T], file: Path) -> T:
    """Return the options of a file. Raises UsageError for an invalid file, key or value."""
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"cannot read --config {file}: Not a regular file")  # a device may never end
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read --config {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {file} is not TOML: {error}") from None
    known = [field.name.replace("_", "-") for field in fields(options_type)]  # type: ignore[arg-type]
    args: list[str] = []
    for key, value in content.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else "--help shows what there is"
            raise UsageError(f"{file}: there is no option {key!r}; {hint}")
        if isinstance(value, bool):
            arg = [f"--{key}" if value else f"--no-{key}"]
        elif isinstance(value, list):
            arg = [f"--{key}", *map(str, value)]
        else:
            arg = [f"--{key}={value}"]
        try:
            options.parse(options_type, args=arg)
        except UsageError as error:
            raise UsageError(f"{file}: {key} = {value!r}: {error}") from None
        args += arg
    return options.parse(options_type, args=args)
