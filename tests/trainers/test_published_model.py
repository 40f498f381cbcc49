"""The recipe in docs/published_models.md: a tiny Llama from a folder of Hugging Face into FSDP2, trained, and back."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.distributed.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "published_models.md"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="see constraints-trainers.txt"
)


def recipe():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def whole(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def make(folder, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "vocab_size": 66}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="10KB")


def train(folder, steps, to=None):
    names = recipe()
    model, seen, losses = names["train"](f"{folder}/published", f"{folder}/run", steps)
    if to is not None:
        names["publish"](model, to)
        if dist.get_rank() == 0:
            model.config.save_pretrained(to)
    return [batch.tolist() for batch in seen], losses, whole(model)


def rows(ranks):
    return [
        [row for batch in batches for row in batch] for batches in zip(*(seen for seen, _, _ in ranks), strict=True)
    ]


@needs_transformers
def test_in_and_out_again_with_tied_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    make(str(tmp_path / "published"), tied=True)
    run_ranks(2, train, str(tmp_path), 0, str(tmp_path / "out"))
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("published", "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@needs_transformers
def test_a_run_from_a_published_model(tmp_path):
    from transformers import AutoModelForCausalLM

    make(str(tmp_path / "published"), tied=False)
    assert len(list((tmp_path / "published").glob("*.safetensors"))) > 1, "several files and an index"
    first = run_ranks(2, train, str(tmp_path), 3)
    [rest] = run_ranks(1, train, str(tmp_path), 6, str(tmp_path / "out"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in rest[2].items())
    # One rank from the published folder that never stopped has seen the same, and ends with the same.
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "published").symlink_to(tmp_path / "published")
    [alone] = run_ranks(1, train, str(tmp_path / "again"), 6)
    assert rows(first) + rows([rest]) == rows([alone])
    torch.testing.assert_close(rest[2], alone[2], rtol=1e-4, atol=1e-5)


def test_names_that_differ_are_told(tmp_path):
    from safetensors.torch import save_file

    model = torch.nn.Linear(2, 3)
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"differ in \['bias'\]"):
        recipe()["load_published"](str(tmp_path), model)
    save_file({"weight": torch.ones(3, 2), "bias": torch.full((3,), 2.0)}, tmp_path / "model.safetensors")
    recipe()["load_published"](str(tmp_path), model)
    assert (model.weight.unique().tolist(), model.bias.unique().tolist()) == ([1.0], [2.0])
