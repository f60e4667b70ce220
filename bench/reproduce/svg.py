"""Line charts as small SVG files: axes with ticks, linear or logarithmic, a legend; nothing else. Standard library only."""
import math

COLOURS = ["#0b62a4", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#444444", "#00a6a6", "#b5651d"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 66, 16, 30, 46


def ticks(low, high, log):
    if log:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        found = [10.0 ** e for e in range(first, last + 1) if low <= 10.0 ** e * 1.0000001 and 10.0 ** e <= high * 1.0000001]
        if len(found) < 3:
            found = [m * 10.0 ** e for e in range(first, last + 1) for m in (1, 2, 5)]
        return [t for t in found if low <= t * 1.0000001 and t <= high * 1.0000001]
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 7)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def text(x, y, words, anchor="middle", more=""):
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>'


def chart(title, x_label, y_label, series, log_x=False, log_y=False, x_ticks=None, y_range=None, legend="right"):
    """series: (label, [(x, y), ...][, style]) with style "line", "dots", "dash" or "both"; a y of None breaks the line. The legend
    stands at the right or left of the top, or at the right of the bottom."""
    series = [tuple(s) + ("both",) if len(s) == 2 else tuple(s) for s in series]
    points = [p for s in series for p in s[1] if p[1] is not None and not (log_y and p[1] <= 0)]
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = y_range or (min(p[1] for p in points), max(p[1] for p in points))
    if log_y and not y_range:
        y0, y1 = y0 / 1.15, y1 * 1.15
    elif not y_range:
        y0, y1 = y0 - 0.04 * (y1 - y0), y1 + 0.04 * (y1 - y0)

    def place(value, low, high, log):
        return (math.log(value / low) / math.log(high / low)) if log else (value - low) / (high - low)

    def px(x):
        return LEFT + place(x, x0, x1, log_x) * (WIDTH - LEFT - RIGHT)

    def py(y):
        return HEIGHT - BOTTOM - place(y, y0, y1, log_y) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(WIDTH / 2, 18, title, more='font-size="14"')]
    for t in x_ticks or ticks(x0, x1, log_x):
        out.append(f'<line x1="{px(t):.1f}" x2="{px(t):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        out.append(text(px(t), HEIGHT - BOTTOM + 16, f"{t:g}"))
    for t in ticks(y0, y1, log_y):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(t):.1f}" y2="{py(t):.1f}" stroke="#e4e4e4"/>')
        out.append(text(LEFT - 6, py(t) + 4, f"{t:g}", "end"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(text(15, middle, y_label, more=f'transform="rotate(-90 15 {middle:.1f})"'))
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
               'fill="none" stroke="#888"/>')
    for i, (label, values, style) in enumerate(series):
        colour, run, runs = COLOURS[i % len(COLOURS)], [], []
        for x, y in values:
            if y is None or (log_y and y <= 0) or not y0 <= y <= y1:
                runs.append(run)
                run = []
                continue
            run.append(f"{px(x):.1f},{py(y):.1f}")
        for r in runs + [run]:
            if style != "dots" and len(r) > 1:
                dash = ' stroke-dasharray="5 4"' if style == "dash" else ""
                out.append(f'<polyline points="{" ".join(r)}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
            if style in ("dots", "both"):
                out += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.8" fill="{colour}"/>' for p in r]
        x, anchor = (LEFT + 12, "start") if legend == "left" else (WIDTH - RIGHT - 12, "end")
        y = HEIGHT - BOTTOM - 12 - 16 * (len(series) - 1 - i) if legend == "bottom" else TOP + 18 + 16 * i
        out.append(text(x, y, label, anchor, f'fill="{colour}"'))
    return "\n".join(out + ["</svg>"]) + "\n"
