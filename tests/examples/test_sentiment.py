"""Sentiment with evidence: what is read, what is learned, and what the pages of evidence say and how."""

import html.parser
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from examples.sentiment import evidence, learning, model, page, picture, reviews, tokens
from examples.sentiment.__main__ import main
from examples.sentiment.evidence import Evidence
from examples.sentiment.learning import Examples, forget, judge
from examples.sentiment.reviews import Review
from examples.training import InputError

DATA = Path(reviews.__file__).parent / "data"
REAL_DATA = Path(os.environ.get("FASTATTN_DATA", Path(__file__).parents[3] / "shared" / "data"))
real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"the real corpora are not at {REAL_DATA}")

SMALL = ["--d-model=32", "--dim-feedforward=32", "--dropout=0.1", "--word-dropout=0.1", "--min-frequency=1",
         "--batch-size=4", "--warmup=10", "--learning-rate=3e-3"]  # fmt: skip


def small_model(vocabulary=50, **sizes) -> fastattn.nn.SequenceClassifier:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "nhead": 3, "num_layers": 2, "dim_feedforward": 16} | sizes
    return model.build(vocabulary, **sizes).eval()


def run(*arguments) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture
def refused(error_of):
    """What a run with these arguments says that fails."""
    return lambda *arguments: error_of(lambda: main([str(argument) for argument in arguments]))


# --- what is read ---


@pytest.fixture
def archive(tmp_path) -> Path:
    path = tmp_path / "aclImdb.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        tar.add(DATA / "aclImdb", "aclImdb")
    return path


def test_imdb_is_the_same_from_its_folder_and_from_its_archive(archive):
    corpus = reviews.load("imdb", DATA / "aclImdb")
    assert corpus == reviews.load("imdb", archive)
    assert (len(corpus.train), len(corpus.held_out), len(corpus.test)) == (14, 2, 6)
    assert {review.name: review.label for review in corpus.test} == {
        f"test/{folder}/{number}_{stars}.txt": label
        for folder, stars, label in (("pos", 8, 1), ("neg", 1, 0))
        for number in range(3)
    }
    assert corpus.find("test/pos/1_8.txt").text == (
        "A delight. Clever & beautiful; the best film for a long time.\nWonderful!"
    )
    assert reviews.majority(corpus.test) == 0.5


def test_the_seed_decides_what_is_held_out_and_never_the_test_part():
    corpora = [reviews.load("imdb", DATA / "aclImdb", seed) for seed in range(4)]
    assert len({tuple(review.name for review in corpus.held_out) for corpus in corpora}) > 1
    assert all(corpus.test == corpora[0].test for corpus in corpora)
    for corpus in corpora:
        names = [review.name for part in (corpus.train, corpus.held_out, corpus.test) for review in part]
        assert len(set(names)) == len(names) == 22


def test_a_sentence_of_chabsa_has_the_polarity_of_most_of_its_opinions():
    corpus = reviews.load("chabsa", DATA / "chABSA")
    sentences = [*corpus.train, *corpus.held_out, *corpus.test]
    labels = {review.text: review.label for review in sentences}
    assert labels["売上高は前年に比べ増加しました"] == 1
    assert labels["魚の売上は減少し、費用は増加しました"] == 0
    assert labels["売上高と利益は増加し、在庫は横ばいでした"] == 1
    assert "本店は港の近くにあります" not in labels  # no opinion
    assert "茶の売上は増加し、菓子の売上は減少しました" not in labels  # one of each
    assert "紙の価格は横ばいでした" not in labels  # neutral
    assert len(sentences) == 12
    reports = [{review.name.split(":")[0] for review in part} for part in (corpus.train, corpus.held_out, corpus.test)]
    assert sum(len(part) for part in reports) == len(set.union(*reports)) == 6


def test_rt_polarity_is_read_as_latin_1(tmp_path):
    for suffix, word in (("pos", "d\u00e9lice"), ("neg", "na\u00efve")):
        (tmp_path / f"rt-polarity.{suffix}").write_bytes(
            "".join(f"{word}\x85 {i}\n" for i in range(10)).encode("latin-1")
        )
    corpus = reviews.load("rt-polarity", tmp_path)
    assert [len(part) for part in (corpus.train, corpus.held_out, corpus.test)] == [16, 2, 2]
    by_name = {review.name: (review.text, review.label) for part in (corpus.train, corpus.held_out, corpus.test)
             for review in part}  # fmt: skip
    assert by_name["rt-polarity.pos:4"] == ("d\u00e9lice\x85 3", 1)  # an ellipsis to some
    assert by_name["rt-polarity.neg:1"] == ("na\u00efve\x85 0", 0)


def test_bad_data_is_refused_in_a_sentence(tmp_path, archive):
    def load(corpus, path):
        with pytest.raises(InputError) as error:
            reviews.load(corpus, path)
        return str(error.value)

    assert "does not exist" in load("imdb", tmp_path / "nowhere")
    assert "got none to train" in load("imdb", DATA / "chABSA")
    assert "got none to train" in load("chabsa", DATA / "aclImdb")
    assert "rt-polarity.neg and rt-polarity.pos" in load("rt-polarity", tmp_path)
    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(archive.read_bytes()[:1000])
    assert f"a whole tar archive, got {cut}" in load("imdb", cut)
    assert "a whole tar archive" in load("imdb", DATA / "chABSA" / "e00001_ann.json")
    for content in ('{"sentences": [{"sentence": "x"}]}', "[", "[1]"):
        (tmp_path / "e1_ann.json").write_text(content)
        assert "annotated sentences in JSON" in load("chabsa", tmp_path)
    (tmp_path / "e1_ann.json").write_bytes(b"\xff")
    assert "UTF-8, got e1_ann.json" in load("chabsa", tmp_path)


@real_data
def test_the_real_corpora_have_their_published_sizes():
    imdb = reviews.load("imdb", REAL_DATA / "aclImdb-30k.tar.xz")
    assert (len(imdb.train), len(imdb.held_out), len(imdb.test)) == (22500, 2500, 5000)
    assert reviews.majority(imdb.test) == 0.5
    chabsa = reviews.load("chabsa", REAL_DATA / "chABSA")
    labels = [review.label for part in (chabsa.train, chabsa.held_out, chabsa.test) for review in part]
    assert (labels.count(1), labels.count(0)) == (1670, 1143)


# --- tokens ---


@pytest.mark.parametrize("unit", ["word", "character", "subword"])
def test_tokens_say_where_in_the_text_they_are(unit):
    text = "売上は増加、Good & bad"
    tokenizer = tokens.train([text] * 3, unit, 60, 1)
    ((ids, spans),) = ((tokenized.ids, tokenized.spans) for tokenized in tokens.tokenize(tokenizer, [text]))
    assert (ids[0], spans[0]) == (tokens.CLASSIFY, (0, 0))
    words = [text[start:stop] for start, stop in spans[1:]]
    assert "".join(words) == text.replace(" ", "")
    assert tokens.UNKNOWN not in ids
    expected = {"word": ["売上は増加", "、", "Good", "&", "bad"], "character": list(text.replace(" ", ""))}
    assert words == expected.get(unit, words)


def test_rare_words_and_strange_signs_are_unknown_and_case_does_not_count():
    tokenizer = tokens.train(["a film, a FILM", "once"], "word", 10, 2)
    assert sorted(tokenizer.get_vocab()) == ["<cls>", "<pad>", "<unk>", "a", "film"]
    (tokenized,) = tokens.tokenize(tokenizer, ["A Film once <pad>"])
    film, a = tokenizer.token_to_id("film"), tokenizer.token_to_id("a")
    # What a text says is text, also where it looks like a token that the model keeps for itself.
    assert tokenized.ids == [tokens.CLASSIFY, a, film, *[tokens.UNKNOWN] * 4]


def test_a_long_text_keeps_both_its_ends():
    text = " ".join(f"w{i}" for i in range(100))
    tokenizer = tokens.train([text], "word", 200, 1)
    (tokenized,) = tokens.tokenize(tokenizer, [text], max_tokens=8)
    assert [text[start:stop] for start, stop in tokenized.spans] == ["", "w0", "w1", "w2", "w3", "w97", "w98", "w99"]
    assert [tokenizer.id_to_token(i) for i in tokenized.ids] == ["<cls>", "w0", "w1", "w2", "w3", "w97", "w98", "w99"]
    (whole,) = tokens.tokenize(tokenizer, [text], max_tokens=101)
    assert len(whole.ids) == 101


# --- the model ---


def test_padding_changes_no_verdict():
    classifier = small_model()
    ids = torch.randint(3, 50, (2, 12))
    ids[:, 0] = tokens.CLASSIFY
    ids[1, 5:] = tokens.PADDING
    torch.testing.assert_close(classifier(ids)[1], classifier(ids[1:, :5])[0])


def test_the_verdict_depends_on_the_order_of_the_words():
    classifier = small_model()
    ids = torch.tensor([[tokens.CLASSIFY, 5, 6, 7]])
    assert not torch.allclose(classifier(ids), classifier(ids[:, [0, 2, 1, 3]]), atol=1e-4)


def test_words_are_forgotten_and_never_the_special_tokens():
    ids = torch.tensor([[tokens.CLASSIFY, 7, 8, tokens.PADDING]])
    assert forget(ids, 1.0).tolist() == [[tokens.CLASSIFY, tokens.UNKNOWN, tokens.UNKNOWN, tokens.PADDING]]
    assert torch.equal(forget(ids, 0.0), ids)
    torch.manual_seed(0)
    assert (forget(torch.full((100, 100), 7), 0.3) == tokens.UNKNOWN).float().mean() == pytest.approx(0.3, abs=0.02)


def test_word_vectors_are_read_scaled_and_frozen(tmp_path):
    classifier = small_model(vocabulary=6, d_model=4, nhead=1)
    before = classifier.embedding.weight.clone()
    path = tmp_path / "vectors.txt"
    with_spaces = "never . . 8 8 8 8\nnever name@domain.com 7 7 7 7\n"  # words, as GloVe has some
    path.write_text(f"5 4\n{with_spaces}good 1 2 3 4\nelsewhere 9 9 9 9\nbad -1 0 0 1\n", encoding="utf-8")
    assert model.use_vectors(classifier, path, {"good": 3, "bad": 4, "never": 5}) == 2
    weight = classifier.embedding.weight
    assert not weight.requires_grad
    expected = torch.tensor([[1.0, 2, 3, 4], [-1, 0, 0, 1]])
    torch.testing.assert_close(weight[3:5] / weight[3, 0], expected)
    assert weight[3:5].square().mean().sqrt() == pytest.approx(0.5)  # 1 / sqrt(d_model)
    assert torch.equal(weight[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("good 1 2 3\n", "must have 4 numbers each, the model's width, got 3 in line 1"),
        ("good 1 2 3 4 5\n", "must have 4 numbers each, the model's width, got 5 in line 1"),
        ("good 1 2 3 x\n", "a text file of words and their numbers"),
        ("other 1 2 3 4\n", "none of those"),
    ],
)
def test_other_word_vectors_are_refused(tmp_path, content, said):
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        model.use_vectors(small_model(vocabulary=6, d_model=4, nhead=1), path, {"good": 3})


def test_a_model_is_saved_whole_and_a_damaged_one_is_refused(tmp_path):
    classifier = small_model()
    tokenizer = tokens.train([" ".join(f"w{i}" for i in range(47))], "word", 50, 1)
    said = {"corpus": "imdb", "seed": 0, "epoch": 3, "held_out_accuracy": 0.5}
    model.save(classifier, tokenizer, tmp_path, said)
    again, same_tokenizer, about = model.load(tmp_path)
    assert about == said
    assert same_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not again.training
    ids = torch.tensor([[tokens.CLASSIFY, 5, 6]])
    assert torch.equal(again(ids), classifier(ids))
    for name, why in ((model.MODEL, "is damaged"), (model.TOKENIZER, "the tokenizer"), (model.ABOUT, "a file that")):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=why):
            model.load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    tokens.train(["a"], "word", 50, 1).save(str(tmp_path / model.TOKENIZER))
    with pytest.raises(InputError, match="must have 50 tokens like the model, got 4"):
        model.load(tmp_path)
    other = fastattn.nn.LanguageModel(fastattn.nn.TransformerConfig(9, d_model=8, nhead=2))
    fastattn.nn.save(other, tmp_path / model.MODEL)
    with pytest.raises(InputError, match="must be the folder of a trained classifier, got a LanguageModel"):
        model.load(tmp_path)
    with pytest.raises(InputError, match=r"which has no about\.json"):
        model.load(tmp_path / "none")


# --- the evidence ---


def plain_attention(layer, x) -> torch.Tensor:
    """[H, n, n], written out."""
    heads, (n, width) = layer.self_attn.num_heads, x.shape
    q, k, _ = (layer.norm1(x) @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).split(width, dim=-1)
    q, k = (part.reshape(n, heads, -1).transpose(0, 1) for part in (q, k))
    return (q @ k.mT / (width // heads) ** 0.5).softmax(-1)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_evidence_is_that_of_the_plain_matrices(heads, layers):
    classifier = small_model(nhead=heads, num_layers=layers)
    with torch.no_grad():
        for parameter in classifier.encoder.parameters():  # so that attention is far from even
            parameter.mul_(2)
    ids = torch.cat([torch.tensor([tokens.CLASSIFY]), torch.randint(3, 50, (16,))])
    collected = evidence.collect(classifier, ids)

    with torch.no_grad():
        inputs, matrices = [], []
        with classifier.encoder.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0])):
            classifier(ids[None])
        x = inputs[0][0]
        for layer in classifier.encoder.layers:
            matrices.append(plain_attention(layer, x))
            x = layer(x[None])[0]
        rollout = torch.eye(17)
        for level in reversed(range(layers)):
            rollout = rollout @ (0.5 * torch.eye(17) + 0.5 * matrices[level].mean(0))
            torch.testing.assert_close(collected.rolled[level], rollout[0])
        torch.testing.assert_close(collected.raw, torch.stack([matrix[:, 0] for matrix in matrices]))
        torch.testing.assert_close(collected.probabilities, classifier(ids[None])[0].softmax(-1))
    torch.testing.assert_close(collected.rolled.sum(-1), torch.ones(layers))
    assert collected.raw.max() > 3 / 17


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor had that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_the_evidence_for_4000_tokens_makes_no_square_tensor():
    n, classifier = 4000, small_model()
    ids = torch.cat([torch.tensor([tokens.CLASSIFY]), torch.randint(3, 50, (n - 1,))])
    with LargestTensor() as largest:
        collected = evidence.collect(classifier, ids)
    assert collected.raw.shape == (2, 3, n)
    assert collected.rolled.shape == (2, n)
    assert n * 24 <= largest.elements <= max(3 * n * 24, model.MAX_TOKENS * 24)  # q, k and v together; positions


def even(n: int, layers: int = 2, heads: int = 1) -> Evidence:
    """Evidence that differs in nothing, of n tokens."""
    return Evidence(torch.tensor([0.25, 0.75]), torch.full((layers, heads, n), 1 / n), torch.full((layers, n), 1 / n))


def test_tokens_that_share_a_sign_become_one_part_with_their_sum():
    text = "\u3231\u304c\u5897\u53ce"  # one sign for three, and three more
    tokenizer = tokens.train([text], "character", 20, 1)
    (tokenized,) = tokens.tokenize(tokenizer, [text])
    assert len(tokenized.ids) == 7
    weights = torch.arange(7.0)
    merged, spans = Evidence(torch.ones(2), weights[None, None], weights[None]).on_text(tokenized.spans)
    assert spans == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4)]
    assert merged.raw.tolist() == [[[0, 1 + 2 + 3, 4, 5, 6]]]
    assert merged.rolled.tolist() == [[0, 1 + 2 + 3, 4, 5, 6]]


def test_views_are_every_row_under_its_name():
    rows = evidence.Evidence(torch.ones(2), torch.arange(12.0).reshape(2, 2, 3), -torch.arange(6.0).reshape(2, 3))
    assert [(view.name, view.weights.tolist()) for view in rows.views()] == [
        ("rolled out, layers 1 to 2", [0, -1, -2]),
        ("rolled out, layer 2", [-3, -4, -5]),
        ("raw, layer 1, head 1", [0, 1, 2]),
        ("raw, layer 1, head 2", [3, 4, 5]),
        ("raw, layer 2, head 1", [6, 7, 8]),
        ("raw, layer 2, head 2", [9, 10, 11]),
    ]
    view = evidence.View("x", torch.tensor([0.5, 0.1, 0.4]))
    assert view.shades().tolist() == pytest.approx([0, 0.25, 1])
    assert view.strongest(5) == [2, 1]


# --- the pages ---


class Page(html.parser.HTMLParser):
    """What a browser would read: all text of the paragraph, its shaded parts, each with its style, and every tag."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.text, self.shaded, self.open = [], "", [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if attributes.get("class") == "text" or (self.open and tag == "b"):
            self.open.append(tag)
            if tag == "b":
                self.shaded.append(["", attributes["style"]])

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.text += data
            if self.open[-1] == "b":
                self.shaded[-1][0] += data


def test_a_page_shows_the_text_and_nothing_of_it_is_markup():
    text = "Say <script>alert('&amp;')</script>\n\"fun\" & 1 < 2"
    name = "<img src=x onerror=alert(1)>"
    spans = [(0, 0), (0, 3), (4, 35), (36, 37), (37, 40), (43, 44), (45, 47), (47, 48)]  # the script is one token
    seen = even(len(spans))
    seen.rolled[0, 2] = 0.5
    source = page.render(Review(name, text, 0), spans, seen)
    read = Page(source)
    assert read.text == text
    assert [word for word, _ in read.shaded] == [text[start:stop] for start, stop in spans[1:]]
    assert read.shaded[1][0] == "<script>alert('&amp;')</script>"
    assert read.shaded[1][1] == "--v0:1.00;--v1:1.00;--v2:1.00;--v3:1.00"
    assert read.shaded[0][1].startswith(f"--v0:{1 / len(spans) / 0.5:.2f};--v1:1.00")
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in read.tags}
    attributes = [pair for _, by_name in read.tags for pair in by_name.items()]
    assert not any(name.startswith("on") or name == "src" for name, _ in attributes)
    ids = {value for name, value in attributes if name == "id"}
    assert {value.removeprefix("#") for name, value in attributes if name == "href"} <= ids  # links lead nowhere else
    assert "url(" not in source
    assert "@import" not in source


def test_a_page_says_prediction_and_truth():
    spans = [(0, 0), (0, 4)]
    read = {label: page.render(Review("r", "good", label), spans, even(2)) for label in (0, 1, None)}
    for source in read.values():
        assert "<dd>Positive, 75.0&nbsp;%</dd>" in source
    assert '<dd class="right">Positive: right</dd>' in read[1]
    assert '<dd class="wrong">Negative: wrong</dd>' in read[0]
    assert '<dd class="">Not known</dd>' in read[None]


def test_each_view_of_a_page_has_a_button_that_chooses_its_shades():
    source = page.render(Review("r", "good", 1), [(0, 0), (0, 4)], even(2, layers=2, heads=3))
    buttons = [attributes for tag, attributes in Page(source).tags if tag == "input"]
    assert [attributes["id"] for attributes in buttons] == [f"v{i}" for i in range(8)]
    assert [i for i, attributes in enumerate(buttons) if "checked" in attributes] == [0]
    for i in range(8):
        assert f"main:has(#v{i}:checked) b {{ --shade: var(--v{i}); }}" in source


def test_text_on_the_strongest_shade_keeps_its_contrast():
    def luminance(red, green, blue):
        linear = [
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (red / 255, green / 255, blue / 255)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    style = page.render(Review("r", "good", 1), [(0, 0), (0, 4)], even(2))
    ink = style.split("--ink: #")[1][:6]
    heat = style.split("--heat: ")[1].split(";")[0].split()
    dark = luminance(*bytes.fromhex(ink))
    light = luminance(*map(int, heat))
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, 1.4.3


def test_a_japanese_page_says_that_it_is():
    text = "売上高は増加し、\u3231みなと商店は好調でした"
    tokenizer = tokens.train([text], "character", 50, 1)
    (tokenized,) = tokens.tokenize(tokenizer, [text])
    seen, spans = even(len(tokenized.ids)).on_text(tokenized.spans)
    read = Page(page.render(Review("e1:0", text, 1), spans, seen))
    assert read.text == text
    assert [word for word, _ in read.shaded] == list(text)
    (paragraph,) = [attributes for tag, attributes in read.tags if attributes.get("class") == "text"]
    assert paragraph["lang"] == "ja"
    assert {attributes["lang"] for tag, attributes in read.tags if tag == "bdi"} == {"ja"}
    assert page.language("good") == "en"


def test_a_picture_shades_the_words_by_their_weight(tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    text = "one two $three$"
    spans = [(0, 0), (0, 3), (4, 7), (8, 15)]
    amounts = {}
    for strongest in (1, 2):
        seen = even(4)
        seen.rolled.fill_(0.01)
        seen.raw.fill_(0)
        seen.rolled[0, strongest] = 1
        path = tmp_path / f"{strongest}.png"
        picture.draw(Review("r", text, 1), spans, seen, path)
        pixels = matplotlib_image.imread(path)[..., :3]
        below = pixels[pixels.shape[0] * 3 // 4 :]  # the text, under the heat map
        heat = (below - torch.tensor([0xF0, 0x7D, 0x0A]).numpy() / 255).__abs__().max(-1) < 0.02
        amounts[strongest] = [int(heat[:, : heat.shape[1] // 14].sum()), int(heat.sum())]
    assert amounts[1][0] > 100  # the first word, at the left
    assert amounts[2][0] < amounts[1][0] / 2
    assert amounts[2][1] > 100


# --- the program ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run("train", "imdb", "--data", DATA / "aclImdb", "--output", folder, "--epochs=30", *SMALL)
    return folder


def test_training_learns_the_tiny_reviews(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["epochs"] == 30
    assert metrics["history"][0]["train_loss"] > 0.5 > 0.05 > metrics["history"][-1]["train_loss"]
    classifier, tokenizer, about = model.load(trained)
    corpus = reviews.load("imdb", DATA / "aclImdb")
    best = max(entry["held_out_accuracy"] for entry in metrics["history"])
    assert about["held_out_accuracy"] == best
    assert about["epoch"] == next(x["epoch"] for x in metrics["history"] if x["held_out_accuracy"] == best)
    figures = json.loads((trained / "test.json").read_text())
    assert figures["accuracy"] == judge(classifier, Examples.of(corpus.test, tokenizer))["accuracy"]
    assert figures["majority"] == 0.5


def test_judging_again_says_the_same(trained, capsys):
    before = json.loads((trained / "test.json").read_text())
    run("test", "--model", trained, "--data", DATA / "aclImdb")
    assert json.loads((trained / "test.json").read_text()) == before
    assert f"accuracy = {before['accuracy']:.4f} on the 6 test reviews of imdb (majority class 0.5000)" in (
        capsys.readouterr().out
    )


def test_evidence_is_written_for_reviews_of_the_corpus_and_for_ones_own(trained, tmp_path, capsys):
    show = ("show", "--model", trained, "--output", tmp_path)
    run(*show, "--data", DATA / "aclImdb", "--review", "test/pos/2_8.txt", "--review", "test/neg/2_1.txt")
    run(*show, "--text", "A superb film & <b>I loved it</b>.")
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("test-pos-2_8.txt", "test-neg-2_1.txt", "text") for kind in ("html", "png")
    }
    assert Page((tmp_path / "test-pos-2_8.txt.html").read_text()).text == (
        "He types <script>alert('boo')</script> & wins the day: great fun, I loved it."
    )
    assert "text.html: positive, " in capsys.readouterr().out
    assert (tmp_path / "text.png").read_bytes().startswith(b"\x89PNG")


def test_sentences_of_chabsa_are_learned_by_their_characters(tmp_path):
    run("train", "chabsa", "--data", DATA / "chABSA", "--output", tmp_path, "--epochs=20", "--nhead=4", *SMALL)
    history = json.loads((tmp_path / "metrics.json").read_text())["history"]
    assert history[-1]["train_loss"] < 0.3
    run("show", "--model", tmp_path, "--data", DATA / "chABSA", "--count=1", "--output", tmp_path)
    (written,) = tmp_path.glob("*.html")
    assert 'lang="ja"' in written.read_text()


def test_a_run_that_was_stopped_goes_on_as_the_same_run(tmp_path):
    """Also with its best model so far; tests/examples/test_training.py kills runs anywhere."""
    options = ["--data", DATA / "aclImdb", "--checkpoint-every=1", *SMALL]
    for name, epochs in (("whole", 3), ("cut", 1), ("cut", 3)):
        run("train", "imdb", "--output", tmp_path / name, f"--epochs={epochs}", *options)
    whole, cut = (model.load(tmp_path / name) for name in ("whole", "cut"))
    assert whole[2] == cut[2]
    for name, weight in whole[0].state_dict().items():
        assert torch.equal(weight, cut[0].state_dict()[name]), name
    histories = [json.loads((tmp_path / name / "metrics.json").read_text())["history"] for name in ("whole", "cut")]
    assert histories[0] == histories[1]


def test_the_model_that_is_kept_is_that_of_the_first_best_epoch(tmp_path, monkeypatch):
    accuracies, weights = iter([0.0, 0.9, 0.9, 0.5, 0.7]), []  # of four epochs, and of the test

    def judged(classifier, examples):
        weights.append(classifier.head.weight.detach().clone())
        return {"accuracy": next(accuracies), "loss": 1.0}

    monkeypatch.setattr(learning, "judge", judged)
    monkeypatch.setattr("examples.sentiment.__main__.judge", judged)
    run("train", "imdb", "--data", DATA / "aclImdb", "--output", tmp_path, "--epochs=4", *SMALL)
    classifier, _, about = model.load(tmp_path)
    assert (about["epoch"], about["held_out_accuracy"]) == (2, 0.9)
    assert torch.equal(classifier.head.weight, weights[1])
    assert torch.equal(weights[4], weights[1])  # what was tested
    assert not torch.equal(weights[2], weights[1])


def test_frozen_word_vectors_stay_what_they_were(tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"superb{' 1' * 32}\nboring{' -1' * 32}\n")
    run("train", "imdb", "--data", DATA / "aclImdb", "--output", tmp_path, "--epochs=2", "--vectors", vectors, *SMALL)
    classifier, tokenizer, _ = model.load(tmp_path)
    actual = classifier.embedding.weight[[tokenizer.token_to_id("superb"), tokenizer.token_to_id("boring")]]
    torch.testing.assert_close(actual, torch.tensor([[1.0], [-1.0]]).expand(2, 32) * 32**-0.5)


def test_a_folder_begun_anew_forgets_the_best_model_of_the_run_before(tmp_path):
    (tmp_path / model.ABOUT).write_text('{"held_out_accuracy": 2.0}')
    run("train", "imdb", "--data", DATA / "aclImdb", "--output", tmp_path, "--epochs=1", *SMALL)
    assert model.load(tmp_path)[2]["held_out_accuracy"] <= 1


def test_a_run_with_other_settings_leaves_the_folder_as_it_was(trained, refused):
    before = {file.name: file.read_bytes() for file in trained.iterdir()}
    options = ["--data", DATA / "aclImdb", "--output", trained, *SMALL]
    assert "d_model must be 32" in refused("train", "imdb", *options, "--d-model=16")
    assert "unit must be 'word'" in refused("train", "imdb", *options, "--unit=character")
    assert {file.name: file.read_bytes() for file in trained.iterdir()} == before


def test_a_run_with_other_reviews_or_labels_does_not_resume(tmp_path, refused):
    other = shutil.copytree(DATA / "aclImdb", tmp_path / "aclImdb")
    options = ["--output", tmp_path / "run", "--epochs=1", "--vocabulary=30", *SMALL]
    run("train", "imdb", "--data", other, *options)
    for review in other.glob("train/*/*.txt"):
        review.write_text(" ".join(word[::-1] for word in review.read_text().split()))
    assert "sha256 must be" in refused("train", "imdb", "--data", other, *options)
    shutil.copytree(DATA / "aclImdb/train/neg", other / "train/neg", dirs_exist_ok=True)
    shutil.copytree(DATA / "aclImdb/train/neg", other / "train/pos", dirs_exist_ok=True)
    assert "sha256 must be" in refused("train", "imdb", "--data", other, *options)
    run("train", "imdb", "--data", shutil.copytree(DATA / "aclImdb", tmp_path / "moved"), *options)


def test_mistakes_get_one_sentence(trained, tmp_path, capsys, refused):
    def damaged(folder: Path, about: str) -> Path:
        copy = shutil.copytree(folder, tmp_path / "damaged", dirs_exist_ok=True)
        (copy / "about.json").write_text(about)
        return copy

    data = ("--data", DATA / "aclImdb")
    assert "does not exist" in refused("test", "--model", trained, "--data", tmp_path / "no")
    assert "must be the folder of a trained model" in refused("test", "--model", tmp_path, *data)
    show = ("show", "--model", trained, "--output", tmp_path)
    assert "must be the name of one in the data" in refused(*show, *data, "--review", "test/pos/9.txt")
    assert "must have a token to shade" in refused(*show, "--text", " ")
    assert "must be in the encoding of the terminal" in refused(*show, "--text", "\udcfc")
    assert "must have fewer than 8192 tokens, got 9001" in refused(*show, "--text", "good " * 9000)
    assert "must be a file that training wrote" in refused("test", "--model", damaged(trained, "[]"), *data)
    assert "must be a file that training wrote" in refused("test", "--model", damaged(trained, "{}"), *data)
    assert "File exists" in refused("show", "--model", trained, "--text", "good", "--output", __file__)
    new = ("train", "imdb", *data, "--output", tmp_path)
    assert "vocabulary must have room for" in refused(*new, "--vocabulary=2")
    assert "vocabulary must have room for" in refused(*new, "--vocabulary=4", "--unit=subword")
    assert "nhead must divide d_model = 300, got 7" in refused(*new, "--nhead=7")
    assert "max_tokens must be at most 8192, got 8193" in refused(*new, "--max-tokens=8193")
    assert "vectors must be a text file" in refused(*new, "--vectors", tmp_path / "no")
    for wrong in ("--dropout=1", "--word-dropout=-0.1", "--epochs=0", "--d-model=x", "--weight-decay=nan"):
        with pytest.raises(SystemExit):
            main([str(argument) for argument in (*new, wrong)])
        assert "must be a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["test", "--model", str(trained), "--data", str(tmp_path), "--device", "nowhere"])
    assert "argument --device: must be one that torch can use here" in capsys.readouterr().err


def test_each_command_has_help(capsys):
    for arguments in ([], ["train"], ["train", "imdb"], ["train", "chabsa"], ["test"], ["show"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
    assert "default: character" in capsys.readouterr().out
