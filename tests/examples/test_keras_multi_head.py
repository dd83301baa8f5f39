"""The Keras layer: against its formula, against Keras itself, and the program around it."""

from __future__ import annotations

import copy
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor

import fresh_python
import numpy as np
import pytest
import torch
from torch import Tensor

from examples.keras_multi_head import __main__ as program
from examples.keras_multi_head.layer import MultiHeadAttention
from examples.keras_multi_head.model import Classifier
from fastattn.testing import compare

B, N_Q, N_K = 3, 4, 6
FEATURES, HEADS = 12, 3


def formula(layer: MultiHeadAttention, inputs: list[Tensor], masks: list[Tensor | None]) -> Tensor:
    """The layer head by head, with masks that multiply the exponentials."""
    act = layer.activation or (lambda x: x)
    biases = [0 if b is None else b for b in (layer.bq, layer.bk, layer.bv, layer.bo)]
    kernels = (layer.Wq, layer.Wk, layer.Wv)
    q, k, v = (act(x @ w + b).chunk(HEADS, dim=-1) for x, w, b in zip(inputs, kernels, biases[:3], strict=True))
    outputs = []
    for q_h, k_h, v_h in zip(q, k, v, strict=True):
        scores = q_h @ k_h.mT / q_h.shape[-1] ** 0.5
        e = torch.exp(scores - scores.max(-1, keepdim=True).values)
        if layer.history_only:
            e = e * torch.ones(e.shape[-2:]).tril()
        for mask, axis in zip(masks, (-1, -2, -2), strict=True):
            e = e if mask is None else e * mask.unsqueeze(axis)
        total = e.sum(-1, keepdim=True)
        outputs.append(e / total.where(total > 0, 1) @ v_h)
    return act(torch.cat(outputs, dim=-1) @ layer.Wo + biases[3])


def layer_of(**options: object) -> MultiHeadAttention:
    """With biases that are not 0, as in training."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(FEATURES, HEADS, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("b"):
                parameter.normal_()
    return layer


def inputs(*widths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    lengths = (N_Q, N_K, N_K)
    return [torch.randn(B, n, w).to(dtype).requires_grad_() for n, w in zip(lengths, widths, strict=True)]


def real(lengths: list[int], n: int) -> Tensor:
    return torch.arange(n) < torch.tensor(lengths)[:, None]


REAL_Q, REAL_K, REAL_V = real([4, 2, 3], N_Q), real([6, 1, 0], N_K), real([5, 6, 6], N_K)
MASKS = {
    "none": [None, None, None],
    "query": [REAL_Q, None, None],
    "key": [None, REAL_K, None],
    "value": [None, None, REAL_V],
    "all": [REAL_Q, REAL_K, REAL_V],
    "all as numbers": [REAL_Q.float(), REAL_K.float(), REAL_V.float()],
    "fractions": [REAL_Q, torch.rand(B, N_K, generator=torch.Generator().manual_seed(2)), REAL_V.float()],
}
LAYERS = {
    "plain": {},
    "relu": {"activation": torch.relu},
    "without biases": {"use_bias": False},
    "history": {"history_only": True},
    "other widths": {"query_num": 5, "key_num": 7, "value_num": 9, "activation": torch.tanh},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_layer_is_the_formula(options, masks):
    def learned_from(compute, layer: MultiHeadAttention) -> list[Tensor]:
        widths = (layer.Wq.shape[0], layer.Wk.shape[0], layer.Wv.shape[0])
        qkv = inputs(*widths, dtype=layer.Wq.dtype)
        output = compute(layer, qkv, masks)
        torch.manual_seed(3)
        gradients = torch.autograd.grad((output * torch.randn(output.shape)).sum(), [*qkv, *layer.parameters()])
        return [output.detach(), torch.cat([gradient.flatten() for gradient in gradients])]

    layer = layer_of(**options)
    actual = learned_from(lambda layer, qkv, masks: layer(qkv, masks), layer)
    naive = learned_from(formula, layer)
    exact = learned_from(formula, copy.deepcopy(layer).double())
    for name, *values in zip(("output", "gradients"), actual, naive, exact, strict=True):
        assert (error := compare(name, *values)).right, error


def test_one_tensor_is_self_attention_with_one_mask():
    layer = layer_of(activation=torch.relu)
    x = inputs(FEATURES, FEATURES, FEATURES)[1]
    mask = real([6, 2, 4], N_K)
    assert torch.equal(layer(x, mask), layer([x, x, x], [mask, mask, mask]))
    assert torch.equal(layer(x), layer([x, x, x]))


def test_initialisation_is_glorot_normal_and_biases_are_0():
    torch.manual_seed(0)
    layer = MultiHeadAttention(256, 4, query_num=64)
    for kernel in (layer.Wq, layer.Wk, layer.Wv, layer.Wo):
        torch.testing.assert_close(kernel.std().item(), (2 / sum(kernel.shape)) ** 0.5, rtol=0.02, atol=0)
        torch.testing.assert_close((kernel.abs().median() / kernel.std()).item(), 0.6745, rtol=0.03, atol=0)
    assert not any(bias.any() for bias in (layer.bq, layer.bk, layer.bv, layer.bo))


@pytest.mark.parametrize("heads", [0, 5, 13])
def test_heads_that_do_not_divide_the_features(heads):
    with pytest.raises(ValueError, match=f"head_num must divide feature_num, which is 12, got {heads}"):
        MultiHeadAttention(12, heads)


# Against keras.layers.MultiHeadAttention, in a process of its own: Keras reads its backend when it is imported.


def _with_torch_as_backend() -> None:
    os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(scope="module")
def keras_process():
    with ProcessPoolExecutor(1, fresh_python.forks(), initializer=_with_torch_as_backend) as executor:
        yield executor


def ours_from_kerass(call: dict, arrays: list[np.ndarray], masks: list[np.ndarray | None], options: dict):
    """(Keras's output, ours, Keras's weights, those that ours gives back): Keras's layer is made, and taken over."""
    import keras

    keras.utils.set_random_seed(0)
    q, k, v = (torch.from_numpy(x) for x in arrays)
    _, key_mask, value_mask = masks
    layer = keras.layers.MultiHeadAttention(bias_initializer="random_normal", **options)
    theirs = layer(q, v, k, key_mask=key_mask, value_mask=value_mask, **call)
    ours = MultiHeadAttention.from_keras(layer, history_only=call.get("use_causal_mask", False))
    output = ours([q, k, v], [None if m is None else torch.from_numpy(m) for m in masks])
    return theirs.detach().numpy(), output.detach().numpy(), layer.get_weights(), ours.keras_weights()


def kerass_from_ours(options: dict, weights: list[np.ndarray], arrays: list[np.ndarray]) -> np.ndarray:
    """The output of Keras's layer with our weights."""
    import keras

    layer = keras.layers.MultiHeadAttention(**options)
    q, k, v = (torch.from_numpy(x) for x in arrays)
    layer.build(q.shape, v.shape, k.shape)
    layer.set_weights(weights)
    return layer(q, v, k).detach().numpy()


def refusals_of_from_keras() -> list[str]:
    """What from_keras says to layers that this one cannot be."""
    import keras

    said = []
    for layer, width in (
        (keras.layers.MultiHeadAttention(3, 4, name="not_built"), None),
        (keras.layers.MultiHeadAttention(3, 4, value_dim=5), 12),
        (keras.layers.MultiHeadAttention(3, 4, output_shape=8), 12),
        (keras.layers.MultiHeadAttention(3, 4, use_gate=True), 12),
        (keras.layers.MultiHeadAttention(3, 4, sliding_window=2, name="windowed"), 12),
    ):
        if width:
            layer.build((1, 2, width), (1, 2, width))
        try:
            MultiHeadAttention.from_keras(layer)
        except ValueError as error:
            said.append(str(error))
    return said


def close_to_rounding(actual: np.ndarray, expected: np.ndarray) -> None:
    """Both are in fp32 and of about size 1."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(expected).max())


@pytest.mark.parametrize("widths", [(FEATURES,) * 3, (5, 7, 9)], ids=["same widths", "other widths"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("use_bias", [True, False])
def test_weights_of_keras_give_its_outputs_at_real_queries(keras_process, widths, causal, use_bias):
    arrays = [x.detach().numpy() for x in inputs(*widths)]
    masks = [REAL_Q.numpy(), real([6, 1, 4], N_K).numpy(), REAL_V.numpy()]
    options = {"num_heads": HEADS, "key_dim": FEATURES // HEADS, "output_shape": FEATURES, "use_bias": use_bias}
    theirs, ours, weights, returned = keras_process.submit(
        ours_from_kerass, {"use_causal_mask": causal}, arrays, masks, options
    ).result()
    close_to_rounding(ours[masks[0]], theirs[masks[0]])
    assert len(weights) == (8 if use_bias else 4)
    for array, again in zip(weights, returned, strict=True):
        np.testing.assert_array_equal(again, array)


def test_our_weights_give_the_outputs_in_keras(keras_process):
    layer = layer_of(query_num=5, key_num=7, value_num=9)
    qkv = [x.detach() for x in inputs(5, 7, 9)]
    options = {"num_heads": HEADS, "key_dim": FEATURES // HEADS, "output_shape": FEATURES}
    theirs = keras_process.submit(kerass_from_ours, options, layer.keras_weights(), [x.numpy() for x in qkv]).result()
    close_to_rounding(layer(qkv).detach().numpy(), theirs)


def test_layers_of_keras_that_are_something_else(keras_process):
    assert keras_process.submit(refusals_of_from_keras).result() == [
        "not_built must be built, so that it has weights, got one that is not",
        "Wv must be [12, 3, 4] or [12, 12], got [12, 3, 5]",
        "Wo must be [3, 4, 12] or [12, 12], got [3, 4, 8]",
        "weights must be 8 arrays (Wq, bq, Wk, bk, Wv, bv, Wo, bo), got 10",
        "windowed must not have a sliding_window, got 2",
    ]


def test_weights_of_keras_multi_head_have_no_axis_of_heads():
    layer, other = layer_of(), MultiHeadAttention(FEATURES, HEADS)
    flat = [getattr(layer, name).detach().numpy() for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo")]
    other.load_keras_weights(flat)
    for name, parameter in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], parameter)


def test_a_wrong_weight_changes_nothing():
    layer = layer_of()
    before = {name: parameter.clone() for name, parameter in layer.state_dict().items()}
    weights = layer_of(use_bias=True).keras_weights()
    weights[0] = weights[0] + 1
    weights[-1] = weights[-1][:-1]
    with pytest.raises(ValueError, match=r"bo must be \[12\], got \[11\]"):
        layer.load_keras_weights(weights)
    assert all(torch.equal(layer.state_dict()[name], parameter) for name, parameter in before.items())


# The model and the program.


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(vocabulary=20, labels=3, width=16, heads=2, blocks=2).eval()


def test_padding_and_the_other_sentences_change_nothing(classifier):
    words = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 0, 0, 0]])
    logits = classifier(words)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(classifier(torch.nn.functional.pad(words, (0, 4))), logits)
    torch.testing.assert_close(classifier(words[1:, :2]), logits[1:])


def test_every_word_and_its_place_matter(classifier):
    words = torch.tensor([[5, 6, 7, 8]])
    logits = classifier(words)
    for i in range(4):
        changed = words.clone()
        changed[0, i] = 12
        assert not torch.allclose(classifier(changed), logits)
    assert not torch.allclose(classifier(words[:, [1, 0, 2, 3]]), logits)


def test_tiny_data_is_learnt_by_heart(capsys, tmp_path):
    options = ["--width", "16", "--output", str(tmp_path), "--min-frequency", "1", "--dropout", "0.1", "--lr", "0.01"]
    assert program.main([*options, "--epochs", "12", "--batch-size", "8"]) == 0
    losses = [entry["train_loss"] for entry in json.loads((tmp_path / "metrics.json").read_text())["history"]]
    assert losses[0] > 0.5
    assert losses[-1] < 0.05
    printed = capsys.readouterr()
    assert re.search(r"accuracy = \d\.\d+ on 4 test sentences after 12 epochs", printed.out)
    assert program.main([*options, "--epochs", "13", "--batch-size", "8"]) == 0
    assert "resumed at step 60 (epoch 13)" in capsys.readouterr().err


def test_bad_options_are_one_sentence(error_of, tmp_path):
    for options, why in (
        (("--heads", "3"), "--heads must divide --width, which is 64, got 3"),
        (("--data", str(tmp_path)), "rt-polarity.neg must be a file with a sentence a line, got No such file"),
    ):
        assert why in error_of(lambda of=options: program.main([*of, "--output", str(tmp_path / "run")]))
