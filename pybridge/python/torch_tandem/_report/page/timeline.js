// How long both runners worked and waited: in each iteration, and in time.

const PHASES = { tracing: "trace", "co-execution": "graph", mixed: "mixed", imperative: "imperative" };
const LEFT = 78; // of the charts, for their labels

function timelineSection({ report, timeline }) {
  const { steps, phases } = report;
  const events = timeline.python.length + timeline.runs.length;
  if (!steps.length && !events && !phases.length) return null;

  const views = [];
  if (steps.length) views.push(["steps", "Each iteration", () => stepChart(report, steps)]);
  if (events) views.push(["time", "In time", () => laneChart(timeline)]);
  const holder = h("div");
  const shown = new Map();
  const show = (name) => {
    for (const [other, element] of shown) element.hidden = other !== name;
    if (shown.has(name)) return;
    const element = h("div");
    shown.set(name, element);
    holder.append(element);
    element.append(views.find(([other]) => other === name)[2]());
  };
  const section = h(
    "section",
    { id: "timeline" },
    h("h2", null, "Iterations"),
    h(
      "p",
      { class: "lead" },
      "Each bar is an iteration. Where Python waits while GraphRunner works, the kernels set the pace; where ",
      "GraphRunner waits while Python works, Python does. Two tall waits are time that both lost. Kernels run on ",
      "Python's thread where that is faster.",
    ),
    views.length > 1 ? h("div", { class: "bar" }, choice("View", views, show)) : null,
    holder,
  );
  // Charts measure their width, so they are made when the section is on the page.
  return Object.assign(section, { start: () => (views.length ? show(views[0][0]) : null) });
}

// --- Each iteration -----------------------------------------------------------------------------------------

// What each runner does, with its field and its color. The times of a runner add up to those of the iteration.
const SERIES = [
  {
    title: "PythonRunner",
    kinds: [
      ["works", "python_exec_us", "python"],
      ["runs kernels", "python_kernels_us", "pythonKernels"],
      ["waits", "python_stall_us", "pythonStall"],
    ],
  },
  {
    title: "GraphRunner",
    kinds: [
      ["works", "runner_exec_us", "graph"],
      ["waits", "runner_stall_us", "graphStall"],
    ],
  },
];

const timeOf = (series, amount) => series.kinds.reduce((sum, [, field]) => sum + amount(field), 0);

// The axis ends a little above most bars; few long ones, such as the first traces, are cut.
function axisEnd(times) {
  const sorted = times.toSorted((a, b) => a - b);
  const most = sorted.at(-1) || 1;
  const few = Math.max(Math.ceil(times.length * 0.05), Math.min(3, Math.floor(times.length / 3)));
  const usual = sorted.at(-1 - few) || most;
  return most > 1.8 * usual ? 1.3 * usual : most * 1.04;
}

function stepChart(report, steps) {
  const canvas = h("canvas", {
    style: { height: "350px" },
    role: "img",
    "aria-label": "Time of each iteration: PythonRunner and GraphRunner, working and waiting",
  });
  const chart = h("div", { class: "chart" }, canvas);
  const tip = new Tip(chart);
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const whole = [Math.min(1, steps[0].number), Math.max(report.phases.at(-1)?.to ?? 0, steps.at(-1).number)];
  const right = 8;
  let hovered = null;

  const span = new Span(canvas, {
    from: 0,
    to: steps.length,
    least: Math.min(8, steps.length),
    plot: () => ({ left: LEFT, width: canvas.clientWidth - LEFT - right }),
    changed: () => redraw(),
    hovered: hover,
  });

  function hover(x, y) {
    const number = x === null ? -1 : Math.floor(span.at(x));
    hovered = x >= LEFT && number >= 0 && number < steps.length ? number : null;
    if (hovered === null) tip.hide();
    else tip.show(x, y, ...describe(steps[hovered]));
    redraw();
  }

  function describe(step) {
    const did = ({ title, kinds }) => [
      title,
      kinds
        .filter(([, field]) => step[field])
        .map(([what, field]) => `${what} ${duration(step[field])}`)
        .join(", "),
    ];
    return [
      h("b", null, `Iteration ${count(step.number)}`),
      facts([
        ...SERIES.map(did),
        ["in all", duration(timeOf(SERIES[0], (field) => step[field]))],
        [
          "operators",
          `${count(step.ops)}, ${step.traced ? `${count(step.traced)} traced` : "all co-executed"}`,
        ],
        ["divergences", step.divergences ? count(step.divergences) : null],
      ]),
    ];
  }

  // Bars narrower than two pixels are drawn together, as their mean.
  function bars(width) {
    const from = Math.max(Math.floor(span.from), 0);
    const to = Math.min(Math.ceil(span.to), steps.length);
    const each = Math.max(1, Math.ceil((2 * (span.to - span.from)) / width));
    const found = [];
    for (let at = from - (from % each); at < to; at += each) {
      const part = steps.slice(Math.max(at, 0), Math.min(at + each, steps.length));
      const mean = (name) => part.reduce((sum, step) => sum + step[name], 0) / part.length;
      found.push({ at, each: part.length, mean, divergences: part.some((step) => step.divergences) });
    }
    return found;
  }

  function draw(pen, width, height, colors) {
    const plot = span.plot();
    const shown = bars(plot.width);
    const top = axisEnd(shown.map(({ mean }) => Math.max(...SERIES.map((series) => timeOf(series, mean)))));
    drawPhases(pen, plot, colors);
    const barTop = 62;
    const space = 30;
    const barHeight = (height - barTop - 36 - space) / 2;
    SERIES.forEach((series, row) => {
      const y = barTop + row * (barHeight + space);
      drawScale(pen, plot, y, barHeight, top, series.title, colors);
      for (const bar of shown) drawBar(pen, bar, series, y, barHeight, top, colors);
    });
    const bottom = barTop + 2 * barHeight + space;
    drawMarks(pen, shown, bottom + 2, colors);
    drawNumbers(pen, plot, bottom + 8, colors);
    if (hovered !== null) {
      pen.fillStyle = colors.text;
      pen.globalAlpha = 0.1;
      pen.fillRect(
        span.x(hovered),
        barTop - 6,
        Math.max(span.x(hovered + 1) - span.x(hovered), 1),
        bottom - barTop + 6,
      );
      pen.globalAlpha = 1;
    }
    span.drawDragged(pen, barTop - 6, bottom - barTop + 6, colors.accent);
    tell();
  }

  // All iterations as a strip of phases, with a bracket around those below.
  function drawPhases(pen, plot, colors) {
    const scale = plot.width / (whole[1] - whole[0] + 1);
    const x = (number) => plot.left + (number - whole[0]) * scale;
    pen.fillStyle = colors.panel;
    pen.fillRect(plot.left, 4, plot.width, 14);
    // What is short and rare is drawn last, so that it is seen.
    const usual = (phase) => phase.phase === "co-execution";
    const phases = report.phases.toSorted((a, b) => usual(b) - usual(a));
    for (const phase of phases) {
      pen.fillStyle = colors[PHASES[phase.phase]];
      pen.fillRect(x(phase.from), 4, Math.max((phase.to - phase.from + 1) * scale, 1.5), 14);
    }
    const number = (at) => steps[Math.min(Math.max(Math.round(at), 0), steps.length - 1)].number;
    const [from, to] = [x(number(span.from)), x(number(span.to - 1) + 1)];
    pen.strokeStyle = colors.text;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(plot.left + 0.5, 42);
    pen.bezierCurveTo(plot.left + 0.5, 30, from + 0.5, 36, from + 0.5, 24);
    pen.lineTo(from + 0.5, 1.5);
    pen.lineTo(to - 0.5, 1.5);
    pen.lineTo(to - 0.5, 24);
    pen.bezierCurveTo(to - 0.5, 36, plot.left + plot.width - 0.5, 30, plot.left + plot.width - 0.5, 42);
    pen.globalAlpha = 0.55;
    pen.stroke();
    pen.globalAlpha = 1;
    label(pen, "phases", plot.left - 10, 15, "right", colors.muted);
  }

  function drawScale(pen, plot, y, height, top, title, colors) {
    label(pen, title, 0, y - 5, "left", colors.text, "600 12px");
    for (const tick of ticks(0, top, 3)) {
      const at = Math.round(y + height - (tick / top) * height) + 0.5;
      pen.fillStyle = colors.line;
      pen.fillRect(plot.left, at - 0.5, plot.width, 1);
      if (at > y + 12) label(pen, roundDuration(tick), plot.left - 10, at + 4, "right", colors.muted);
    }
  }

  function drawBar(pen, { at, each, mean }, series, y, height, top, colors) {
    const from = Math.max(span.x(at), LEFT);
    const to = Math.min(span.x(at + each), canvas.clientWidth - right);
    const gap = to - from > 5 ? 1 : 0;
    const width = Math.max(to - from - gap, 0.75);
    let base = y + height;
    let rest = height;
    for (const [, field, color] of series.kinds) {
      const length = Math.min((mean(field) / top) * height, rest);
      rest -= length;
      pen.fillStyle = colors[color];
      pen.fillRect(from, base - length, width, length);
      base -= length;
    }
    if (timeOf(series, mean) > top) {
      pen.fillStyle = colors.page; // cut: the bar goes on
      pen.fillRect(from, y + 6, width, 2);
      pen.fillRect(from, y + 10, width, 2);
    }
  }

  function drawMarks(pen, shown, y, colors) {
    pen.fillStyle = colors.bad;
    for (const bar of shown) {
      if (!bar.divergences) continue;
      const x = (Math.max(span.x(bar.at), LEFT) + span.x(bar.at + bar.each)) / 2;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x - 4.5, y + 8);
      pen.lineTo(x + 4.5, y + 8);
      pen.fill();
    }
  }

  function drawNumbers(pen, plot, y, colors) {
    const number = (at) => steps[Math.min(Math.max(Math.floor(at), 0), steps.length - 1)].number;
    const step = (tick) => steps.findIndex((found) => found.number === tick);
    for (const tick of ticks(number(span.from), number(span.to - 1), plot.width / 110)) {
      const at = step(tick);
      if (at < 0) continue;
      const x = (span.x(at) + span.x(at + 1)) / 2;
      const side = x < plot.left + 20 ? "left" : x > plot.left + plot.width - 16 ? "right" : "center";
      label(pen, count(tick), x, y + 18, side, colors.muted);
    }
    label(pen, "iteration", plot.left - 10, y + 18, "right", colors.muted);
  }

  function tell() {
    const part = steps.slice(Math.floor(span.from), Math.ceil(span.to));
    const total = (name) => part.reduce((sum, step) => sum + step[name], 0);
    const [python, graph] = SERIES.map((series) => timeOf(series, total));
    const diverged = total("divergences");
    const older = steps[0].number - whole[0];
    readout.textContent = [
      `Iterations ${count(part[0]?.number)} to ${count(part.at(-1)?.number)}: Python waited ${percent(total("python_stall_us"), python)}`,
      `, GraphRunner ${percent(total("runner_stall_us"), graph)} of ${duration(python)}; ${plural(diverged, "divergence")}.`,
      older > 0 ? ` The ${count(older)} before are not kept.` : "",
    ].join("");
  }

  let redraw = () => {};
  queueMicrotask(() => (redraw = keepDrawn(canvas, draw)));
  return h(
    "div",
    null,
    h(
      "div",
      { class: "bar" },
      legend([
        ["Python works", "--python"],
        ["Python runs kernels", "--python-kernels"],
        ["Python waits", "--python-stall"],
        ["GraphRunner works", "--graph"],
        ["GraphRunner waits", "--graph-stall"],
        ["tracing", "--trace"],
        ["partly traced", "--mixed"],
        ["divergence", "--bad", "diamond"],
      ]),
      h("span", { class: "push" }, span.buttons()),
    ),
    chart,
    readout,
  );
}

// --- In time ------------------------------------------------------------------------------------------------

function laneChart(timeline) {
  const { python, runs, steps } = timeline;
  const runner = runs.filter((run) => run[2] === "beside");
  const inline = runs.filter((run) => run[2] === "inline");
  const starts = [...python, ...runs].map((event) => event[0]);
  const ends = [...python, ...runs].map((event) => event[0] + event[1]);
  for (const [, from, to] of steps) (starts.push(from), ends.push(to));
  const first = starts.reduce((a, b) => Math.min(a, b), Infinity);
  const last = ends.reduce((a, b) => Math.max(a, b), -Infinity);
  const kinds = { trace: "trace", stall: "pythonStall", fetch: "pythonStall", kernels: "python" };
  const lanes = { python: 34, runner: 92 };
  const tall = 40;

  const canvas = h("canvas", {
    style: { height: "172px" },
    role: "img",
    "aria-label": "What PythonRunner and GraphRunner did at each time, in the newest iterations",
  });
  const chart = h("div", { class: "chart" }, canvas);
  const tip = new Tip(chart);
  const span = new Span(canvas, {
    from: first,
    to: last,
    least: 20,
    plot: () => ({ left: LEFT + 24, width: canvas.clientWidth - LEFT - 32 }),
    changed: () => redraw(),
    hovered: hover,
  });

  function hover(x, y) {
    if (x === null) return tip.hide();
    const time = span.at(x);
    const within = (list) => list.findLast(([start, length]) => start <= time && time < start + length);
    const step = steps.find(([, from, to]) => from <= time && time < to);
    const content = step ? [h("b", null, `Iteration ${count(step[0])}`)] : [];
    if (y >= lanes.python && y < lanes.python + tall) {
      const event = within(python);
      const run = within(inline);
      const doing = { stall: "waits for GraphRunner", fetch: "waits for a value", trace: "traces", kernels: "works" };
      if (run)
        content.push(
          facts([
            ["PythonRunner", `runs the kernels of block ${run[3]}`],
            ["for", duration(run[1])],
            ["operators", count(run[4])],
          ]),
        );
      else if (event)
        content.push(
          facts([
            ["PythonRunner", doing[event[2]] ?? event[2]],
            ["for", duration(event[1])],
            ["at", shortLine(event[4])],
          ]),
        );
      else if (step) content.push(facts([["PythonRunner", "runs the program"]]));
    } else if (y >= lanes.runner && y < lanes.runner + tall) {
      const event = within(runner);
      if (event)
        content.push(
          facts([
            ["GraphRunner", `block ${event[3]}`],
            ["for", duration(event[1])],
            ["operators", count(event[4])],
          ]),
        );
      else content.push(facts([["GraphRunner", "waits"]]));
    }
    if (content.length) tip.show(x, y, ...content);
    else tip.hide();
  }

  function draw(pen, width, height, colors) {
    const plot = span.plot();
    pen.save();
    pen.beginPath();
    pen.rect(plot.left, 0, plot.width, height);
    pen.clip();
    let free = -Infinity;
    steps.forEach(([number, from, to], index) => {
      const [a, b] = [span.x(from), span.x(to)];
      if (b < plot.left || a > plot.left + plot.width) return;
      pen.fillStyle = index % 2 ? colors.panel : colors.page;
      pen.fillRect(a, 22, b - a, lanes.runner + tall - 14);
      pen.fillStyle = colors.python;
      pen.fillRect(a, lanes.python, Math.max(b - a - (b - a > 4 ? 1 : 0), 0.5), tall);
      const x = Math.max(a, plot.left) + 3;
      if (x < free) return;
      label(pen, count(number), x, 16, "left", colors.muted);
      free = x + 54;
    });
    pen.fillStyle = colors.graphStall;
    pen.fillRect(plot.left, lanes.runner, plot.width, tall);
    events(pen, python, lanes.python, (event) => colors[kinds[event[2]] ?? "imperative"]);
    events(pen, inline, lanes.python, () => colors.pythonKernels);
    events(pen, runner, lanes.runner, () => colors.graph);
    const times = ticks(span.from - first, span.to - first, plot.width / 120);
    const step = times.length > 1 ? times[1] - times[0] : span.to - span.from;
    for (const tick of times) {
      const x = span.x(tick + first);
      pen.fillStyle = colors.text;
      pen.globalAlpha = 0.14;
      pen.fillRect(Math.round(x), 22, 1, lanes.runner + tall - 18);
      pen.globalAlpha = 1;
      label(
        pen,
        axisTime(tick, step),
        x,
        lanes.runner + tall + 20,
        axisSide(x, plot.left, plot.left + plot.width),
        colors.muted,
      );
    }
    span.drawDragged(pen, 22, lanes.runner + tall - 18, colors.accent);
    pen.restore();
    label(pen, "iteration", plot.left - 12, 16, "right", colors.muted);
    label(pen, "PythonRunner", plot.left - 12, lanes.python + 24, "right", colors.text);
    label(pen, "GraphRunner", plot.left - 12, lanes.runner + 24, "right", colors.text);
  }

  function events(pen, list, y, color) {
    const plot = span.plot();
    for (const event of list) {
      const [a, b] = [span.x(event[0]), span.x(event[0] + event[1])];
      if (b < plot.left || a > plot.left + plot.width) continue;
      pen.fillStyle = color(event);
      pen.fillRect(a, y, Math.max(b - a - (b - a > 3 ? 0.5 : 0), 0.5), tall);
    }
  }

  let redraw = () => {};
  queueMicrotask(() => {
    redraw = keepDrawn(canvas, draw);
    // A few iterations are readable at once.
    const near = steps.slice(-6);
    if (near.length > 1) span.show(near[0][1], near.at(-1)[2]);
  });
  return h(
    "div",
    null,
    h(
      "div",
      { class: "bar" },
      legend([
        ["Python works", "--python"],
        ["Python runs kernels", "--python-kernels"],
        ["Python waits", "--python-stall"],
        ["Python traces", "--trace"],
        ["GraphRunner works", "--graph"],
        ["GraphRunner waits", "--graph-stall"],
      ]),
      h("span", { class: "push" }, span.buttons()),
    ),
    chart,
    h(
      "p",
      { class: "readout" },
      "Drag to zoom in; Ctrl and the wheel zoom, Shift and the wheel move.",
      timeline.dropped ? ` ${count(timeline.dropped)} older events are left out.` : "",
    ),
  );
}

// The alignment of a label at x, so that the first and the last one are not cut.
function axisSide(x, from, to) {
  return x < from + 30 ? "left" : x > to - 30 ? "right" : "center";
}

// A time on an axis whose ticks are this far apart.
function axisTime(microseconds, step) {
  if (microseconds < 1e6) return roundDuration(microseconds);
  return `${(microseconds / 1e6).toFixed(Math.max(0, Math.ceil(6 - Math.log10(step) - 1e-9)))} s`;
}

function roundDuration(microseconds) {
  return microseconds
    ? duration(microseconds)
        .replace(/\.0+ /, " ")
        .replace(/(\.\d*[1-9])0+ /, "$1 ")
    : "0";
}

function label(pen, text, x, y, align, color, font = "12px") {
  pen.font = `${font} ${SANS}`;
  pen.textAlign = align;
  pen.fillStyle = color;
  pen.fillText(text, x, y);
}
