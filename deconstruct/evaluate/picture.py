"""A table of results as PNG."""

import pathlib

from deconstruct.evaluate import report

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError(
        "--png needs the package matplotlib: pip install -r requirements-evaluate.txt"
    ) from error

# Inches.
_ROW_HEIGHT, _LETTER_WIDTH, _MARGIN = 0.3, 0.1, 0.25


def write(path: pathlib.Path, table: report.Table) -> None:
    """Draws `table`, its last row, which is ours, in bold."""
    texts = [["", *(column.replace("_", " ") for column in table.columns)]]
    texts += [[label, *map(report.cell, values)] for label, values in table.rows.items()]
    widths = [
        _MARGIN + _LETTER_WIDTH * max(map(len, column)) for column in zip(*texts, strict=True)
    ]
    figure = Figure(figsize=(sum(widths), _ROW_HEIGHT * len(texts)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    drawn = axes.table(texts, colWidths=[w / sum(widths) for w in widths], bbox=(0, 0, 1, 1))
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(10)
    for (row, column), cell in drawn.get_celld().items():
        cell.set_edgecolor("0.8")
        cell.get_text().set_horizontalalignment("left" if column == 0 else "right")
        cell.get_text().set_fontweight("bold" if row in (0, len(texts) - 1) else "normal")
        cell.PAD = _MARGIN / 2 / widths[column]
    FigureCanvasAgg(figure).print_png(path)
