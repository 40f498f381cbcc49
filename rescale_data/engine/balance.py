"""Settings of balanced steps (`Balance`), and a cost function for samples of a transformer (`transformer_cost`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rescale_data.errors import checks_argument_types
from rescale_data.layout.step_plan import SyncInterval

BalanceScope: TypeAlias = Literal["rank", "host", "all"]
SampleMeasure: TypeAlias = Callable[[Any], int] | str
"""An integer of each sample: a function that computes it from the sample, or the name of the column that holds it."""

_MAX_MEASURE = 1 << 40
_TOKEN_COLUMNS = ("tokens", "input_ids")


@checks_argument_types
@dataclass(frozen=True, kw_only=True)
class Balance:
    """Settings of balanced steps, in which samples move between micro batches so that all ranks finish at the same time.

    Give them to ``DataLoader(balance=)``; see docs/balance.md.

    Each rank still makes its own samples of a step. Then samples move to other micro batches, within the step alone. The number
    of micro batches in a step stays the same. The number of samples in a micro batch varies; on average it is
    ``micro_batch_size``.

    Args:
        cost: The time to compute a sample, an integer in any unit: a function of the sample, as `transformer_cost` returns, or
            the name of a column.
        over: The places to which a sample may move: "rank", other micro batches of its own rank, which needs no messages;
            "host", other ranks of its host; "all", all ranks.
        sync: "micro" if ranks wait for each other in every micro batch: FSDP, DDP without ``no_sync``; "step" if they wait once
            a step. With "step" the first and the last micro batches of a rank are its smallest, as pipeline parallelism needs.
        padded: True if ``collate_fn`` pads all samples of a micro batch to the longest. Then a micro batch costs its number of
            samples times their largest cost.
        max_tokens: The most tokens of a micro batch that has several samples. Default: ``micro_batch_size`` times the longest
            sample of the step, which a micro batch may also have without balance. A step with more tokens than its micro
            batches may hold exceeds it, with one warning.
        tokens: The number of tokens of a sample, a function or a column. Default: the length of "tokens" or "input_ids". A
            sample with neither counts as one token, so that each micro batch has ``micro_batch_size`` samples.
        weight: The weight of a sample in the loss, a function or a column, such as the number of trained tokens. Each batch
            then has ``"step_weight"``, the sum over the global batch.

    Raises:
        ValueError: ``over`` or ``sync`` has another value, or ``max_tokens`` is less than 1.
        TypeError: ``cost``, ``tokens`` or ``weight`` is neither a function nor a string.

    Example:
        >>> import rescale_data as rd
        >>> documents = [{"tokens": [0] * n} for n in (900, 100, 800, 200)]
        >>> balance = rd.Balance(cost=rd.transformer_cost(crossover=10_000), over="rank")
        >>> loader = rd.DataLoader(
        ...     documents, global_batch_size=4, micro_batch_size=2, balance=balance, collate_fn=lambda samples: samples
        ... )
        >>> sorted(sum(len(sample["tokens"]) for sample in batch) for batch in loader)
        [1000, 1000]
    """

    cost: SampleMeasure
    over: BalanceScope = "host"
    sync: SyncInterval = "micro"
    padded: bool = False
    max_tokens: int | None = None
    tokens: SampleMeasure | None = None
    weight: SampleMeasure | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("over", get_args(BalanceScope)), ("sync", get_args(SyncInterval))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"rd.Balance({name}={getattr(self, name)!r}): give one of {list(allowed)}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"rd.Balance(max_tokens={self.max_tokens}): give at least 1, or leave it out.")
        for name in ("cost", "tokens", "weight"):
            value = getattr(self, name)
            if not (callable(value) or isinstance(value, str) or (value is None and name != "cost")):
                raise TypeError(
                    f"rd.Balance({name}={value!r}) is a {type(value).__name__}: give a function of a sample, or a column."
                )

    def measure(self, sample: Any) -> tuple[int, int, int]:
        """Return the cost, the number of tokens and the loss weight of a sample, as three integers.

        Raises:
            ValueError: One of them is no integer, or is out of range, or the sample has no such column.
        """
        tokens = (_num_tokens(sample) or 1) if self.tokens is None else _measure_sample("tokens", self.tokens, sample)
        weight = 0 if self.weight is None else _measure_sample("weight", self.weight, sample)
        return _measure_sample("cost", self.cost, sample), max(tokens, 1), weight

    def comparable_settings(self) -> dict[str, Any]:
        """Return the settings by name, with functions replaced by their names, so that ranks can compare them."""
        return {
            name: value if isinstance(value, str | int | TransformerCost | None) else getattr(value, "__qualname__", "")
            for name, value in vars(self).items()
        }


@checks_argument_types
def transformer_cost(
    *,
    crossover: float | None = None,
    active_parameters: float | None = None,
    layers: int | None = None,
    attention_width: int | None = None,
) -> TransformerCost:
    """Return a cost function for `Balance`: a document of L tokens costs ``L + L^2 / crossover`` (all layers, plus attention).

    ``crossover`` is the length at which causal attention takes as long as all else: the active parameters divided by
    ``layers * attention_width``. docs/balance.md lists the crossover of ten models.

    Args:
        crossover: The length in tokens; give it in place of the other three.
        active_parameters: The number of parameters that a token is multiplied with. The output head counts, the input embedding
            does not; in a mixture of experts, only the experts that a token passes count.
        layers: The number of layers with full attention.
        attention_width: The number of heads times the dim of a head.

    Returns:
        A function of a sample that has "tokens" or "input_ids", whose length is L. If the sample also has "cost", as
        ``WholeDocumentPacker(cost=True)`` writes it, that number takes the place of L^2: the sum of L^2 over its documents.
        The function pickles.

    Raises:
        ValueError: The arguments are neither ``crossover`` alone nor the other three, one of these three is
            not positive, or the crossover is less than one token.

    Source: 6 * parameters * L operations against 6 * layers * width * L^2, forward and backward (Kaplan et al., "Scaling laws
    for neural language models", 2020, table 1; causal attention is half of theirs).

    Example:
        >>> import rescale_data as rd
        >>> cost = rd.transformer_cost(active_parameters=7.5e9, layers=32, attention_width=4096)
        >>> cost({"tokens": range(57_220)})
        114440
    """
    model_sizes = [value for value in (active_parameters, layers, attention_width) if value is not None]
    if crossover is None and len(model_sizes) == 3 and min(model_sizes) > 0:
        num_parameters, num_layers, layer_width = model_sizes
        crossover, model_sizes = num_parameters / (num_layers * layer_width), []
    if model_sizes or crossover is None or not crossover >= 1:
        raise ValueError(
            f"transformer_cost: crossover={crossover}, active_parameters={active_parameters}, layers={layers}, attention_width="
            f"{attention_width}: give a crossover= of at least 1 token, or the other three, of which it follows, above 0."
        )
    return TransformerCost(int(min(crossover, _MAX_MEASURE)))


@dataclass(frozen=True)
class TransformerCost:
    """The cost function that `transformer_cost` returns."""

    crossover: int

    def __call__(self, sample: Any) -> int:
        length = _num_tokens(sample)
        if length is None:
            column_names = sorted(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            raise ValueError(
                f"transformer_cost looks for the column 'tokens' or 'input_ids'; a sample is {column_names}. "
                f"Give rd.Balance(cost=) a function of the sample."
            )
        sum_of_squares = int(sample["cost"]) if "cost" in sample else length * length
        return length + sum_of_squares // self.crossover


def _num_tokens(sample: Any) -> int | None:
    """Return the number of tokens of a sample, from its column "tokens" or "input_ids"; `None` if it has neither."""
    columns = [name for name in _TOKEN_COLUMNS if name in sample] if isinstance(sample, Mapping) else []
    return len(sample[columns[0]]) if columns else None


def _measure_sample(name: str, measure: SampleMeasure, sample: Any) -> int:
    if isinstance(measure, str) and not (isinstance(sample, Mapping) and measure in sample):
        column_names = sorted(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise ValueError(f"rd.Balance({name}={measure!r}): there is no such column; a sample is {column_names}.")
    value = sample[measure] if isinstance(measure, str) else measure(sample)
    try:
        number = int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rd.Balance({name}=): {value!r} is no integer.") from error
    if not 0 <= number <= _MAX_MEASURE:
        raise ValueError(f"rd.Balance({name}=): a sample has {number}; give 0 to {_MAX_MEASURE}.")
    return number
