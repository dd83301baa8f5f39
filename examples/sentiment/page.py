"""The evidence for a verdict as a web page: one file, without scripts, that any browser shows by itself."""

from __future__ import annotations

import re
from html import escape
from string import Template

import torch

from .evidence import Evidence, View
from .reviews import LABELS, Review

STRONGEST = 6  # words in a row of the table
BINS = 60  # parts of the text in a row's strip

# Shading is one colour from transparent to full, on which the text keeps a contrast of 6 to 1. The radio buttons choose
# by the style sheet alone which of a word's shades, --v0, --v1, ..., is --shade.
_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; --ink: #1c1b19; --soft: #5c5850; --line: #ddd8ce; --paper: #fff; --heat: 240 125 10; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f4ef; color: var(--ink);
       font: 1rem/1.5 system-ui, "Segoe UI", "Noto Sans", "Noto Sans CJK JP", "Hiragino Sans", "Yu Gothic", Meiryo,
             sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { margin: 0; font-size: 1rem; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1rem; }
.verdict { display: flex; flex-wrap: wrap; gap: .25rem 2rem; margin: .5rem 0 1.25rem; font-size: 1.25rem; }
.verdict dt { font-size: .8rem; color: var(--soft); }
.verdict dd { margin: 0; font-weight: 600; }
.right { color: #17602b; } .wrong { color: #a51d1d; }
fieldset { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0 0 .75rem; padding: 0; border: 0; }
legend { padding: 0; margin-bottom: .3rem; font-size: .8rem; color: var(--soft); }
label { padding: .2rem .7rem; border: 1px solid #8d877b; border-radius: 1rem; background: var(--paper);
        font-size: .875rem; cursor: pointer; }
input { position: absolute; opacity: 0; }
input:checked + label { background: var(--ink); border-color: var(--ink); color: #fff; }
input:focus-visible + label { outline: 3px solid #2563c9; outline-offset: 2px; }
.scale { display: flex; align-items: center; gap: .5rem; margin: 0 0 .75rem; font-size: .8rem; color: var(--soft); }
.scale i { width: 8rem; height: .8rem; border: 1px solid var(--line);
           background: linear-gradient(to right, transparent, rgb(var(--heat))); }
.text { margin: 0; padding: 1.25rem 1.5rem; background: var(--paper); border: 1px solid var(--line);
        border-radius: .5rem; line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; }
.text b { padding: .15em 0; border-radius: .15em; font-weight: inherit;
          background: rgb(var(--heat) / var(--shade, 0)); }
.text b:target { outline: 3px solid #2563c9; outline-offset: 1px; }
a { color: inherit; text-decoration-color: #8d877b; text-underline-offset: .2em; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; }
th, td { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { white-space: nowrap; font-weight: 600; }
td.number { text-align: right; white-space: nowrap; }
td span { display: inline-block; margin-right: .9em; white-space: nowrap; }
small { color: var(--soft); font-size: .8125rem; }
svg { display: block; width: 10rem; height: 1.25rem; border: 1px solid var(--line); background: var(--paper); }
rect { fill: rgb(var(--heat)); }
footer { margin-top: 2rem; font-size: .8125rem; color: var(--soft); }
@media print { body { background: none; } .text b, rect, .scale i { print-color-adjust: exact; } }
$choices
</style>
</head>
<body>
<main>
<h1>$name</h1>
<dl class="verdict">
<div><dt>Prediction</dt><dd>$predicted, $probability</dd></div>
<div><dt>Truth</dt><dd class="$outcome">$truth</dd></div>
</dl>
<fieldset>
<legend>Attention that the classifying token pays each token</legend>
$buttons
</fieldset>
<p class="scale">none <i></i> the most in this view; <a href="#strongest">the strongest tokens are below</a></p>
<p class="text" lang="$language">$text</p>
<h2 id="strongest">Strongest tokens</h2>
<div class="wide" role="region" aria-label="Strongest tokens" tabindex="0">
<table>
<thead><tr><th scope="col">View</th><th scope="col">Where in the text</th>
<th scope="col">Tokens, with their share</th><th scope="col">On itself</th></tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
<footer>$count tokens. Raw: where the classifying token reads in a layer. Rolled out: followed down through the layers
to the tokens that were read from, half of each layer's weight by attention, averaged over the heads, and half by the
residual connection. On itself: the weight that stays on the classifying token. Attention shows where a model reads,
which need not be why it decides.</footer>
</main>
</body>
</html>
""")


def render(review: Review, spans: list[tuple[int, int]], evidence: Evidence) -> str:
    """The page of a review, as HTML.

    Args:
        spans: where in the text the tokens are, or the parts that `Evidence.on_text` makes; the first is empty.
    """
    views = evidence.views()
    predicted = int(evidence.probabilities.argmax())
    label = LABELS[predicted].capitalize()
    outcome = "" if review.label is None else "right" if review.label == predicted else "wrong"
    return _PAGE.substitute(
        title=_escape(f"{label}: {review.name}"),
        name=_escape(review.name),
        predicted=label,
        probability=_percent(float(evidence.probabilities[predicted])),
        truth="Not known" if review.label is None else f"{LABELS[review.label].capitalize()}: {outcome}",
        outcome=outcome,
        language=language(review.text),
        choices="\n".join(f"main:has(#v{i}:checked) b {{ --shade: var(--v{i}); }}" for i in range(len(views))),
        buttons="\n".join(
            f'<input type="radio" name="view" id="v{i}"{" checked" * (i == 0)}><label for="v{i}">{view.name}</label>'
            for i, view in enumerate(views)
        ),
        text=_shaded(review.text, spans, views),
        rows="\n".join(_row(review.text, spans, view) for view in views),
        count=len(spans) - 1,
    )


def language(text: str) -> str:
    """The language of a text, by which a browser chooses the glyphs of characters that Chinese and Japanese share."""
    return "ja" if re.search("[\u3040-\u30ff]", text) else "en"


def _shaded(text: str, spans: list[tuple[int, int]], views: list[View]) -> str:
    """The text, each of its tokens with all its shades."""
    shades = torch.stack([view.shades() for view in views]).T.tolist()
    linked = {token for view in views for token in view.strongest(STRONGEST)}
    parts, end = [], 0
    for token, ((start, stop), row) in enumerate(zip(spans, shades, strict=True)):
        if token == 0:  # the classifying one, which is nowhere in the text
            continue
        place = f' id="t{token}"' if token in linked else ""
        style = ";".join(f"--v{view}:{shade:.2f}" for view, shade in enumerate(row) if shade >= 0.005)
        parts += [_escape(text[end:start]), f'<b{place} style="{style}">', _escape(text[start:stop]), "</b>"]
        end = stop
    return "".join([*parts, _escape(text[end:])])


def _row(text: str, spans: list[tuple[int, int]], view: View) -> str:
    """The row of a view in the table."""
    language_of_text = language(text)
    strongest = " ".join(
        f'<span><a href="#t{token}"><bdi lang="{language_of_text}">{_escape(text[slice(*spans[token])])}</bdi></a> '
        f"<small>{_percent(float(view.weights[token]))}</small></span>"
        for token in view.strongest(STRONGEST)
    )
    return (
        f'<tr><th scope="row">{view.name}</th><td>{_strip(view)}</td><td>{strongest}</td>'
        f'<td class="number">{_percent(float(view.weights[0]))}</td></tr>'
    )


def _strip(view: View) -> str:
    """A picture of where in the text the weight is, from left to right."""
    sums = [float(part.sum()) for part in view.weights[1:].tensor_split(min(BINS, max(len(view.weights) - 1, 1)))]
    largest = max(sums) or 1.0
    bars = "".join(
        f'<rect x="{i}" y="{20 - 20 * height / largest:.1f}" width="1" height="{20 * height / largest:.1f}"/>'
        for i, height in enumerate(sums)
    )
    return f'<svg viewBox="0 0 {len(sums)} 20" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.1f}&nbsp;%"


def _escape(text: str) -> str:
    """Text escaped for HTML; control characters, which XML does not allow, become the replacement character."""
    return escape(re.sub("[\x00-\x08\x0b-\x1f\x7f]", "\ufffd", text))
