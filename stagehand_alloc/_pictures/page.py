"""One self-contained HTML page of some runs: no script, nothing loaded from anywhere.

Every picture is in it twice, for wide and for narrow windows; the style sheet shows one of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stagehand_alloc._books import findings as _findings
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books.findings import Finding
from stagehand_alloc._books.markup import escaped, table
from stagehand_alloc._books.plan import PlanLine
from stagehand_alloc._books.runs import Run, Telemetry
from stagehand_alloc._books.table import proposed, weights_lines
from stagehand_alloc._pictures import figures
from stagehand_alloc._settings.sizes import format_bytes as size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = '<meta name="generator" content="stagehand_alloc report">'
Numbers: TypeAlias = Iterator[int]  # of pictures, so that their ids are their own

# Light and dark; the names are those of figures.COLOURS.
_DARK = {
    "ink": "#e6e9ed",
    "faint": "#9aa4af",
    "grid": "#30363d",
    "stays": "#8196b3",
    "moves": "#58a6ff",
    "again": "#f0883e",
    "weights": "#b392f0",
    "waits": "#ff7b93",
    "limit": "#ff7b72",
    "area": "#1c3a63",
}
_STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
main{max-width:1104px;margin:0 auto;padding:24px 32px 64px}
h1{font-size:22px;margin:0}h2{font-size:19px;margin:40px 0 4px}
h3{font-size:16px;margin:28px 0 4px}
p{margin:4px 0 10px;max-width:76ch}
.faint{color:var(--faint)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0}
a{color:var(--moves)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.facts div{border:1px solid var(--grid);border-radius:8px;padding:10px 12px}
.facts b{display:block;font-size:21px;line-height:1.25}
.facts span{color:var(--faint);font-size:14px}
.found{border-left:4px solid var(--stays);padding:2px 0 2px 14px;margin:14px 0}
.found p{margin:0}.found.problem{border-color:var(--waits)}.found.good{border-color:var(--good)}
.found .todo::before{content:"→ ";color:var(--faint)}
figure{margin:10px 0 0}
svg{display:block;width:100%;height:auto}
svg text{font-family:inherit;fill:currentColor}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:6px 0;font-size:14px;
 padding:0;list-style:none}
.legend i{display:inline-block;width:14px;height:12px;border-radius:2px;margin-right:6px;
 vertical-align:-1px}
.legend i.line{height:0;border-top:3px solid;border-radius:0;vertical-align:4px}
.legend i.dash{height:0;border-top:3px dashed;border-radius:0;vertical-align:4px}
.wide-table{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;margin:10px 0}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--grid);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0;white-space:normal}
th{font-weight:600;color:var(--faint)}
code,pre{font:14px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--soft);padding:10px 12px;border-radius:8px;white-space:pre-wrap}
details summary{cursor:pointer;color:var(--moves)}
@media (max-width:720px){main{padding:16px 16px 48px}.wide{display:none}
 .narrow{display:block;max-width:480px}.facts{grid-template-columns:1fr 1fr}}
@media print{.narrow{display:none}.wide{display:block}}
"""


def write(telemetry: Telemetry) -> str:
    """The page. Raises InstallError where matplotlib is missing."""
    figures.require()
    named = _runs.by_name(telemetry.runs)
    files = sorted({run.file for run in telemetry.runs})
    parts = [f"<h1>Memory report</h1>\n<p class='faint'>{escaped(', '.join(files))}</p>"]
    parts += [f"<p>{escaped(note)}</p>" for note in telemetry.notes()]
    if len(named) > 1:
        parts.append(_side_by_side(named))
    numbers = itertools.count()
    for number, (name, run) in enumerate(named):
        parts.append(_one_run(name, run, number, numbers))
    return _around("\n".join(parts), ", ".join(files))


def _around(body: str, title: str) -> str:
    light = "".join(f"--{name}:{value};" for name, value in figures.COLOURS.items())
    dark = "".join(f"--{name}:{value};" for name, value in _DARK.items())
    style = (
        f":root{{color-scheme:light dark;--paper:#fff;--soft:#f3f5f7;--good:#2da160;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{--paper:#14171a;--soft:#1e2328;--good:#3fb971;"
        f"{dark}}}}}{_STYLE}"
    )
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"{MARK}\n<link rel='icon' href='data:,'>\n"
        f"<title>{escaped(title)} · stagehand_alloc</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


# ---- several runs --------------------------------------------------------------------------------


def _side_by_side(named: Sequence[tuple[str, Run]]) -> str:
    rows = [
        (
            f"<a href='#run{number}'>{escaped(name)}</a>",
            size(int(run.last("high"))),
            size(int(run.most("mapped_peak"))),
            size(int(run.typical("spill_bytes"))),
            f"{run.step_ms():.1f}",
            f"{_findings.waits_ms(run):.1f}",
        )
        for number, (name, run) in enumerate(named)
    ]
    head = ("", "high", "peak", "moved a step", "ms a step", "ms waiting")
    found = "".join(map(_finding, _findings.across([run for _, run in named])))
    return f"<h2>Ranks and devices</h2>\n{_table(head, rows)}{found}"


def _one_run(name: str, run: Run, number: int, numbers: Numbers) -> str:
    parts = [f"<section id='run{number}'>"]
    if name:
        parts.append(f"<h2>{escaped(name)}</h2>")
    parts += [_facts(run), "<h2>What limited it, and what to change</h2>"]
    parts += [_finding(finding) for finding in _findings.find(run)]
    for section in (_memory, _time, _links, _fates, _steps, _pinned):
        parts += list(section(run, numbers))
    parts.append("</section>")
    return "\n".join(parts)


# ---- the parts of one run ------------------------------------------------------------------------


def _facts(run: Run) -> str:
    high, peak = run.last("high"), run.most("mapped_peak")
    step = run.step_ms()
    facts = [
        (size(int(peak)), f"peak, of {size(int(high))} high" if high else "peak"),
        (size(int(run.typical("spill_bytes"))), "moved to the host a step"),
    ]
    if run.total("dropped_bytes") > 0:
        facts.append((size(int(run.typical("dropped_bytes"))), "dropped and made again a step"))
    if run.has_weights():
        of = size(int(run.most("weights_bytes")))
        loaded = size(int(run.typical("weights_loaded_bytes")))
        facts.append((loaded, f"of weights come a step, of {of} offloaded"))
    if step > 0:
        facts.append((f"{step:.4g} ms", f"a step, median of {len(run.settled())}"))
        waits = _findings.waits_ms(run)
        facts.append((f"{waits:.3g} ms", f"of it the GPU waits for copies ({waits / step:.0%})"))
    cells = "".join(f"<div><b>{escaped(a)}</b><span>{escaped(b)}</span></div>" for a, b in facts)
    return f"<div class='facts'>{cells}</div>"


def _finding(finding: Finding) -> str:
    return (
        f"<div class='found {finding.level.value}' data-kind='{finding.kind}'>"
        f"<p>{escaped(finding.what)}</p><p class='todo'>{escaped(finding.todo)}</p></div>"
    )


def _memory(run: Run, numbers: Numbers) -> Iterable[str]:
    if run.shape is None:
        yield _missing("Memory over one step", "The run ended before its second step.")
        return
    curve = run.shape.curve
    would = size(max(curve.full))
    yield "<h2>Memory over one step</h2>"
    yield (
        "<p class='faint'>Forward saves tensors for backward, which gives them back. With all of "
        f"them on the GPU this step would have needed {would}.{_idle_weights(run)}</p>"
    )
    low, limit = int(run.last("low")), int(run.last("limit"))
    yield _legend(
        ("moves", "line", "mapped: what the GPU's driver sees"),
        ("area", "", "of it, in use"),
        ("faint", "dash", "in use, if nothing had been moved or dropped"),
    )
    yield _picture(
        lambda width: figures.memory(curve, run.shape.high if run.shape else 0, low, limit, width),
        "Memory over one step",
        numbers,
    )


def _idle_weights(run: Run) -> str:
    """What the engine plans with, and so draws, leaves out what may leave for nothing."""
    if not run.has_weights():
        return ""
    most = size(int(run.most("weights_home_peak")))
    return f" Weights count only while a block holds them; at most {most} of them were there."


def _time(run: Run, numbers: Numbers) -> Iterable[str]:
    parts = time_of(run)
    if not parts:
        return
    yield "<h2>Where the time goes</h2>"
    yield _legend(*((colour, "", f"{name} {ms:.4g} ms") for name, ms, colour in parts))
    drawn = [(ms, colour) for _, ms, colour in parts]
    yield _picture(
        lambda width: figures.times(drawn, width), "Time of one step by what it is for", numbers
    )
    told = [
        f"{run.typical(field):.3g} ms {what}"
        for field, what in _findings.HOST_WAITS.items()
        if run.typical(field) > 0
    ]
    waits = run.typical("host_waits")
    if waits:
        causes = escaped(", ".join(told or ["not timed"]))
        yield f"<p>Beside it the host waits {waits:.0f} times a step: {causes}.</p>"


def time_of(run: Run) -> list[tuple[str, float, str]]:
    """What a step's milliseconds are for, with colours; empty where no step was measured."""
    shape, step = run.shape, run.step_ms()
    if shape is None or shape.all_ms <= 0:
        return []
    computing = max(0.0, shape.all_ms - shape.waited_ms - shape.again_ms)
    outside = max(0.0, step - shape.all_ms)
    parts = [
        ("computing", computing, "moves"),
        ("waiting for copies", shape.waited_ms, "waits"),
        ("making again", shape.again_ms, "again"),
        ("outside of forward and backward", outside, "stays"),
    ]
    return [part for part in parts if part[1] > 0]


def _links(run: Run, numbers: Numbers) -> Iterable[str]:
    rows, told = [], []
    weights = run.typical("weights_loaded_bytes")
    for name, moved, rate, share in _findings.lanes(run):
        could = moved / share if share > 0 else 0.0
        of_weights = min(weights, moved) if name == _findings.BACK else 0.0
        rows.append((f"{name}: {size(int(moved))}", moved, could, of_weights))
        if share > 0:
            told.append(f"{share:.0%} of a step {name} ({rate / 1e9:.3g} GB/s)")
    if not any(moved for _, moved, _, _ in rows):
        return
    yield "<h2>Copies against the link</h2>"
    entries = [("moves", "", "moved in one step")]
    if told:
        yield f"<p class='faint'>The link is busy for {' and '.join(told)}, as measured.</p>"
        entries.append(("grid", "", "what it could have carried meanwhile"))
    if run.has_weights():
        entries.insert(1, ("weights", "", f"of it weights, {size(int(weights))}"))
    yield _legend(*entries)
    yield _picture(lambda width: figures.lanes(rows, width), "Bytes by direction", numbers)
    for line in weights_lines(run):
        yield f"<p>{escaped(line[0].upper() + line[1:])}.</p>"


def _fates(run: Run, numbers: Numbers) -> Iterable[str]:
    lines = [] if run.shape is None else [x for x in run.shape.plan.lines if figures.of(x) > 0]
    if not lines:
        return
    yield "<h2>What stayed, moved, and was made again</h2>"
    yield "<p class='faint'>Saved tensors of one step, by module and by the op that saved them.</p>"
    sums = [sum(getattr(x, name) for x in lines) for name in ("stays", "moves", "dropped")]
    names = ("stays on the GPU", "moves to the host", "is dropped and made again")
    colours = ("stays", "moves", "again")
    entries = zip(colours, names, sums, strict=True)
    yield _legend(*((c, "", f"{name} {size(total)}") for c, name, total in entries if total))
    yield _picture(
        lambda width: figures.by_op(lines, width), "Saved bytes by module and op", numbers
    )
    yield _details("All of them as a table", _fates_table(lines))


def _fates_table(lines: Sequence[PlanLine]) -> str:
    head = ("", "tensors", "stays", "moves", "dropped", "ms again")
    rows = [
        (
            escaped(figures.name_of(line)),
            str(line.storages),
            *(size(one) if one else "" for one in (line.stays, line.moves, line.dropped)),
            f"{line.again_ms:.2f}" if line.again_ms else "",
        )
        for line in sorted(lines, key=lambda line: -figures.of(line))
    ]
    return _table(head, rows)


def _steps(run: Run, numbers: Numbers) -> Iterable[str]:
    if len(run.steps) < 2:
        return
    yield "<h2>The run, step by step</h2>"
    yield _legend(
        ("moves", "line", "peak of each step"),
        ("ink", "line", "time of a step"),
        ("waits", "", "of it the GPU waits for copies"),
    )
    yield _picture(
        lambda width: figures.over_the_run(run, width), "Peak and time of each step", numbers
    )


def _pinned(run: Run, numbers: Numbers) -> Iterable[str]:
    pinned, waste = run.last("pinned_bytes"), run.last("pinned_waste_bytes")
    if pinned <= 0:
        return
    yield "<h2>Pinned host memory</h2>"
    misses = run.total("pool_misses")
    yield (
        f"<p>{size(int(pinned))} pinned, {size(int(waste))} of it empty; a request found no slab "
        f"{misses:.0f} times in this run.</p>"
    )
    if settings := proposed(run):
        yield "<p>No miss and the least waste with:</p>"
        yield f"<pre>config={{{escaped(_as_dict(settings))}}}</pre>"


def _as_dict(settings: str) -> str:
    """Arguments as the entries of a dict."""
    return re.sub(r"(\w+)=", r'"\1": ', settings)


# ---- HTML ----------------------------------------------------------------------------------------


def _missing(title: str, why: str) -> str:
    return f"<h2>{title}</h2>\n<p class='faint'>{why}</p>"


def _legend(*entries: tuple[str, str, str]) -> str:
    """Colour, "", "line" or "dash", and what it is."""
    items = []
    for colour, kind, text in entries:
        paint = "border-color" if kind else "background"
        swatch = f"<i class='{kind}' style='{paint}:var(--{colour})'></i>"
        items.append(f"<li>{swatch}{escaped(text)}</li>")
    return f"<ul class='legend'>{''.join(items)}</ul>"


def _picture(draw: Callable[[int], Figure], what: str, numbers: Numbers) -> str:
    number = next(numbers)
    found = []
    for kind, width in (("wide", figures.WIDE), ("narrow", figures.NARROW)):
        drawn = figures.svg(draw, width, f"p{number}")
        label = f"<svg class='{kind}' role='img' aria-label='{escaped(what)}'"
        found.append(drawn.replace("<svg", label, 1))
    return f"<figure>{''.join(found)}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<div class='wide-table'>{table(head, rows)}</div>"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"
