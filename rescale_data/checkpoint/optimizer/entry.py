"""`OptimizerEntry`: saves an optimizer by parameter name, and loads the parts of a saved one that fit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from rescale_data.checkpoint.devices import state_after_first_step
from rescale_data.checkpoint.entry import Entry, Path
from rescale_data.checkpoint.optimizer.named import GROUPS, named_parameters, named_state
from rescale_data.checkpoint.optimizer.room import allocate_state, cast_like, has_parameter_shapes, missing_settings
from rescale_data.checkpoint.storage.dcp import Contents, StateReader
from rescale_data.checkpoint.tree import map_leaves, tree_of, with_keys_of

ParameterNames = Sequence[str]


class OptimizerEntry(Entry):
    """Saves and loads an optimizer by parameter name; parts of a checkpoint that do not fit are not loaded.

    another optimizer's state, or one by number   ──► nothing is taken
    a group with other parameters                 ──► it keeps its values, and its parameters their state
    an entry that is not shaped as it must be     ──► the parameter keeps its state

    Parameters that have no state in the checkpoint (unused, frozen, never stepped) are left without one: nothing here steps an
    optimizer, but what torch_xla needs.

    Args:
        model: The module that has the optimizer's parameters.

    Raises:
        TypeError: The optimizer's state has keys that are no parameters.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(
            path,
            partial(named_state, model, optimizer),
            self._assign,
            get_optimizer_tensors=partial(_state_tensors, optimizer),
        )
        self.optimizer = optimizer
        if other_keys := [key for key in cast(dict[Any, Any], optimizer.state) if not isinstance(key, torch.Tensor)]:
            raise TypeError(
                f"The state of the optimizer {self.name!r} has {other_keys[:3]}, which belong to no parameter: DCP saves the "
                f"state of parameters alone. Let the optimizer keep them in a group: param_groups[0][{other_keys[0]!r}]."
            )

    def placeholder(self, reader: StateReader) -> dict[str, Any]:
        """Return tensors to load into, for exactly the parameters whose state is in the checkpoint."""
        self._live_state: dict[str, Any] = self.get_value()
        self._parameters = named_parameters(self._live_state, self.optimizer)
        states, self._saved_groups = _saved_state_and_groups(reader.contents, self.path)
        names = self._saved_names(reader)
        if text := _refusal(self.optimizer, self._saved_groups, names):
            self.refusal_texts, self.names_left_out, self._saved_groups = {self.name: text}, {self.name}, []
            return {}
        if not self._saved_groups:
            return {"state": {}, GROUPS: [{"params": group["params"]} for group in self._live_state[GROUPS]]}
        self._saved_indices, difference = match_groups([group["params"] for group in self._live_state[GROUPS]], names)
        unmatched = (
            group["params"] for group, i in zip(self._live_state[GROUPS], self._saved_indices, strict=True) if i is None
        )
        self.refusal_texts = {f"{self.name}.{GROUPS}": difference} if difference else {}
        self._unmatched_names = {*chain(*unmatched)}  # parameters whose state is not taken
        matched = dict(zip(self._saved_indices, self._live_state[GROUPS], strict=True))
        groups = [_allocate_group(saved, matched.get(number, {})) for number, saved in enumerate(self._saved_groups)]
        placeholders = {"state": self._allocate_state(states), GROUPS: groups}
        self.names_left_out = {*self.refusal_texts, *(f"{self.name}.state.{name}" for name in self._unmatched_names)}
        return placeholders

    def _saved_names(self, reader: StateReader) -> list[ParameterNames]:
        """Read the parameter names of each saved group from the checkpoint, where they are plain values."""
        prefix = f"{self.name}.{GROUPS}"
        names = reader.values(f"{prefix}.{i}.params" for i, group in enumerate(self._saved_groups) if "params" in group)
        return [names.get(f"{prefix}.{number}.params") or [] for number in range(len(self._saved_groups))]

    def _allocate_state(self, states: Mapping[str, Any]) -> dict[str, Any]:
        first_states, tensors = state_after_first_step(self.optimizer, [*self._parameters.values()]), dict[str, Any]()
        for name in (name for name in states if name in self._parameters and name not in self._unmatched_names):
            parameter = self._parameters[name]
            live_entry = self.optimizer.state.get(parameter) or first_states.get(parameter, {})
            tensors[name], mismatches = allocate_state(self.optimizer, parameter, live_entry, states[name])
            if mismatches:
                del tensors[name]
                self._unmatched_names.add(name)
                self.refusal_texts |= {f"{self.name}.state.{name}.{entry}": text for entry, text in mismatches.items()}
        return tensors

    def _assign(self, loaded: Any) -> None:
        """Assign the loaded state to the optimizer; a parameter whose saved state is not loaded keeps its own."""
        if not self._saved_groups:
            return
        live, index = self._live_state["state"], {name: number for number, name in enumerate(self._parameters)}
        unmatched = {name: entries for name, entries in live.items() if name in self._unmatched_names}
        states = {
            index[name]: with_keys_of(live.get(name), entry) for name, entry in {**loaded["state"], **unmatched}.items()
        }
        groups = [
            {
                **group,
                **({} if number is None else loaded[GROUPS][number]),
                "params": [index[name] for name in group["params"]],
            }
            for group, number in zip(self._live_state[GROUPS], self._saved_indices, strict=True)
        ]
        self.optimizer.load_state_dict({"state": states, GROUPS: groups})
        is_cast = has_parameter_shapes(self.optimizer)  # what is shaped like its parameter gets the parameter's dtype
        for number, parameter in enumerate(self._parameters.values()):
            if saved := states.get(number):  # torch knows the dtype of a step
                saved_entries = {
                    key: value
                    for key, value in saved.items()
                    if key != "step" and not (is_cast and getattr(value, "shape", None) == parameter.shape)
                }
                self.optimizer.state[parameter] = cast_like(self.optimizer.state[parameter], saved_entries)


def match_groups(groups: Sequence[ParameterNames], saved: Sequence[ParameterNames]) -> tuple[list[int | None], str]:
    """Match parameter groups with saved groups of the same parameters: return saved indices (or None), and a text on misfits.

    Groups with equal parameters (none) go in order.
    """
    group_numbers_by_parameters: defaultdict[frozenset[str], deque[int]] = defaultdict(deque)
    for number, names in enumerate(saved):
        group_numbers_by_parameters[frozenset(names)].append(number)
    queues = [group_numbers_by_parameters[frozenset(names)] for names in groups]
    matches = [queue.popleft() if queue else None for queue in queues]
    unmatched = [f"group {i} of the state, {_first_few(names)}" for i, names in enumerate(groups) if matches[i] is None]
    unmatched += [f"group {i} of the checkpoint, {_first_few(saved[i])}" for i in set(range(len(saved))) - {*matches}]
    difference = (
        f"{len(groups)} parameter groups in the state and {len(saved)} in the checkpoint. Without a match: "
        f"{'; '.join(unmatched[:4])}. Group the parameters as in the run that saved"
    )
    return matches, difference if unmatched else ""


def _refusal(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], group_names: list[ParameterNames]) -> str:
    """Return the reason why saved groups belong to another optimizer, or have no parameter names; else an empty text."""
    if any(group_names) and all(isinstance(name, int) for name in chain(*group_names)):
        return _NUMBERED_PARAMETERS_MESSAGE
    if not (missing := sorted({key for group in groups for key in missing_settings(optimizer, set(group))})):
        return ""
    saved_keys = ", ".join(sorted({key for group in groups for key in group} - {"params"}))
    kind = type(optimizer).__name__
    return f"of another optimizer in the checkpoint: its groups lack {', '.join(missing)} of {kind}; they have {saved_keys}"


def _allocate_group(saved_group: dict[str, Any], live_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors to load a group's own tensors into, such as a learning rate; None for each plain value."""

    def allocate_leaf(path: tuple[Any, ...], leaf: torch.Tensor | None) -> torch.Tensor | None:
        device = getattr(live_group.get(path[0]), "device", None)
        return None if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)

    return map_leaves(saved_group, allocate_leaf)


def _first_few(names: ParameterNames) -> str:
    return f"{list(names[:3])}{' ...' if len(names) > 3 else ''}"


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the tensors of an optimizer's state that have at least one dimension."""
    state_values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in state_values if isinstance(value, torch.Tensor) and value.dim() > 0]


def _saved_state_and_groups(saved: Contents, path: tuple[str, ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a saved optimizer's tensors, on the meta device, by parameter and in each group."""
    part = saved.subtree(path)
    saved_tree = tree_of(part.paths, {name: value for name, value in part.values.items() if len(part.paths[name]) > 2})
    groups = saved_tree.get(GROUPS)
    return saved_tree.get("state", {}), groups if isinstance(groups, list) else []


_NUMBERED_PARAMETERS_MESSAGE = (
    "by number and not by name in the checkpoint, as torch.optim.Optimizer.state_dict() makes it. Give this part of it to "
    "load_state_dict of the optimizer of the same model without wrapping, save that one, and load it"
)
