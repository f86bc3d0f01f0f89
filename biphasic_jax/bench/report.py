"""A record of measurements as tables: in the terminal and in Markdown, from one description."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

GIB = 2**30


@dataclass
class Table:
    """`rows` hold text; the first column is aligned left, the others right."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tables(record: Mapping[str, Any]) -> list[Table]:
    """All tables of a record that `bench` wrote."""
    found = [table for section in record.get("train", []) for table in training_tables(section)]
    if "data" in record:
        found.append(data_table(record["data"]))
    if "startup" in record:
        found.append(startup_table(record["startup"]))
    return found


def training_tables(section: Mapping[str, Any]) -> list[Table]:
    w = section["workload"]
    rate = f" at {w['mask_rate']:.0%}" if w["objective"] == "mlm" else ""
    what = f"{w['objective'].upper()}{rate}"
    model = f"{w['layers']} layers, width {w['width']}, {w['heads']} heads, feed-forward {w['ff_width']}"
    title = (
        f"{what}: {w['rows']} x {w['row_length']} tokens a step, {model}, vocabulary {w['vocab_size']:,}, {w['dtype']}"
    )
    speed = Table(title, ["step of", "seconds", "tokens/s", "MFU", "GiB", "temp GiB", "compile s"])
    bases = [name for name in ("ours", "ours-flags") if any(f"{name}_faster" in v for v in section["variants"])]
    header = ["as", *(cell for name in bases for cell in (f"is {name}", "core-s")), "predicted"]
    factors = Table(f"{what}, {w['rows']} x {w['row_length']}: how many times as fast", header)
    for line in section["variants"]:
        if line["failure"]:
            speed.rows.append([line["name"], "-", *[""] * 5])
            speed.notes.append(f"{line['name']}: {line['failure']}")
            continue
        facts = line["facts"]
        speed.notes.append(f"{line['name']}: {line['label']}")
        speed.rows.append(
            [
                line["name"],
                _spread(line["step_seconds"]),
                f"{line['tokens_per_second']:,.0f}",
                f"{line['mfu']['median']:.0%}" if line["mfu"] else "",
                f"{line['memory_bytes'] / GIB:.2f}",
                f"{facts['temp_bytes'] / GIB:.2f}" if "temp_bytes" in facts else "",
                f"{facts['trace_seconds'] + facts['compile_seconds']:.1f}" if "compile_seconds" in facts else "",
            ]
        )
        predicted = f"{line['predicted']:.2f}" if "predicted" in line else ""
        cells = []
        for name in bases:
            cheaper = line.get(f"{name}_cheaper")
            cells += [_spread(line.get(f"{name}_faster")), f"{cheaper['median']:.2f}" if cheaper else ""]
        if any(cells):
            factors.rows.append([line["name"], *cells, predicted])
    for product in section["products"]:
        if product["failure"]:
            speed.notes.append(f"{product['label']}: {product['failure']}")
        else:
            rates = {key: rate / 1e9 for key, rate in product["flops_per_second"].items()}
            speed.notes.append(f"{product['label']}: {_spread(rates, '.0f')} GFLOP/s")
    speed.notes.append(
        f"{section['rounds']} rounds, one step of each variant a round, order reversed every round; medians "
        "[least-greatest]. MFU: FLOPs of the variant's own step by formula (model/flops.py) over the best matrix "
        "product of the same round. GiB: the most memory its process had; temp: what the compiled step needs besides "
        "its state"
    )
    factors.notes.append(
        "median [least-greatest] of the quotients within a round; core-s: the same in seconds of the cores, summed "
        "over threads, which others on the machine hardly move. Predicted: the quotient of the FLOPs, the factor if "
        "every FLOP costs the same"
    )
    return [speed, factors] if factors.rows else [speed]


def data_table(section: Mapping[str, Any]) -> Table:
    title = f"Data: rows of {section['row_length']:,} tokens, {section['batch_rows']} a batch, one process"
    table = Table(title, ["stage", "Mtokens/s", "Mtokens a core-second", "MB of text/s"])
    for line in section["lines"]:
        if line["failure"]:
            table.rows.append([line["label"], "-", "", ""])
            table.notes.append(f"{line['label']}: {line['failure']}")
            continue
        tokens = {key: rate / 1e6 for key, rate in line["tokens_per_second"].items()}
        core = {key: rate / 1e6 for key, rate in line.get("tokens_per_core_second", {}).items()}
        text = {key: rate / 1e6 for key, rate in line.get("bytes_per_second", {}).items()}
        table.rows.append([line["label"], _spread(tokens, ".1f"), _spread(core, ".1f"), _spread(text, ".1f")])
    table.notes.append(
        f"{section['source']}, {section['documents']:,} documents, {section['tokens']:,} tokens; {section['rounds']} "
        "rounds, interleaved as above. Batches are read shuffled from the prepared shards (in the page cache), masked "
        "and laid out for the device. A core-second is one of the process's own, whoever else is on the machine."
    )
    return table


def startup_table(section: Mapping[str, Any]) -> Table:
    title = " ".join([f"Start of train --config={section['config']}", *(f"--config.{o}" for o in section["overrides"])])
    table = Table(title, ["", "no cache", "compilation cache warm"])
    cold, warm = section["compile"]["cold"], section["compile"]["warm"]
    for before, after in zip(cold, warm, strict=True):
        label = f"compile, phase {before['phase']} ({before['objective']}), s"
        table.rows.append([label, f"{before['seconds']:.1f}", f"{after['seconds']:.1f}"])
    starts = [section["start"]["cold"], section["start"]["warm"]]
    table.rows.append(["process start to first step, s", *(f"{s['seconds_to_first_step']:.1f}" for s in starts)])
    table.rows.append(["tokens/s", *(f"{s['tokens_per_second']:,.0f}" for s in starts)])
    table.rows.append(["MFU, as train reports it", *(f"{s['mfu']:.0%}" for s in starts)])
    table.rows.append(["share of time waiting for data", *(f"{s['data_wait']:.2%}" for s in starts)])
    table.notes.append(
        f"rows prepared beforehand; rates are medians over {starts[0]['steps']} steps of the real loop, the first two "
        "left out"
    )
    return table


def facts_lines(record: Mapping[str, Any]) -> list[str]:
    """Where and with what it was measured."""
    h, versions = record["hardware"], record["versions"]
    lines = [f"{h['processor']}, {h['cores']} cores, {h['memory_bytes'] / GIB:.0f} GiB, {h['platform']}"]
    lines.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    if record["commit"]:
        lines.append(f"commit {record['commit']}")
    load = record["load"]
    lines.append(f"{record['created']}, load average {load['before']:.1f} before and {load['after']:.1f} after")
    return lines


def markdown(record: Mapping[str, Any]) -> str:
    """The record as a Markdown page that names the command which made it."""
    lines = ["# Speed on one machine", "", "```", record["command"], "```", ""]
    lines += [f"- {line}" for line in facts_lines(record)]
    if record["xla_flags"]:
        lines.append(f"- recommended XLA flags: `{record['xla_flags']}`")
    for table in tables(record):
        lines += ["", f"## {table.title}", "", f"| {' | '.join(table.header)} |"]
        lines.append("|---|" + "---:|" * (len(table.header) - 1))
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record in the terminal."""
    for table in tables(record):
        rich_table = RichTable(title=Text(table.title), title_justify="left", header_style="bold")
        for i, name in enumerate(table.header):
            rich_table.add_column(Text(name), justify="left" if i == 0 else "right")
        for row in table.rows:
            rich_table.add_row(*map(Text, row))
        console.print(Group(Text(""), rich_table, *(Text(f"  {note}", style="dim") for note in table.notes)))
    console.print(*(Text(line, style="dim") for line in ["", *facts_lines(record)]), sep="\n")


def _spread(values: Mapping[str, float] | None, form: str = ".2f") -> str:
    if not values:
        return ""
    return f"{values['median']:{form}} [{values['min']:{form}}-{values['max']:{form}}]"
