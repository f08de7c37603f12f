"use strict";
// One iteration per baseline: layers, communication, bytes on the link. The wheel zooms, dragging moves, a double
// click shows everything again; all timelines of a report move together.

const LANES = { compute: 22, operations: 42, bytes: 62 };
const LANE_HEIGHT = 17, ROW_HEIGHT = 108, LEFT = 120, RIGHT = 1060;

function timelines(report) {
  const rows = report.baselines.filter((row) => row.trace);
  const longest = Math.max(...rows.map((row) => row.trace.end));
  const view = { low: 0, high: longest };
  const charts = rows.map((row) => {
    const chart = shape("svg", { viewBox: `0 0 1080 ${ROW_HEIGHT}`, class: "timeline", "data-baseline": row.name });
    return { row, chart };
  });
  const redraw = () => {
    for (const { row, chart } of charts) drawTimeline(chart, row, view, report);
  };
  for (const { chart } of charts) listen(chart, view, longest, redraw);
  redraw();
  return charts.map(({ chart }) => chart);
}

function drawTimeline(chart, row, view, report) {
  const x = scale(view.low, view.high, LEFT, RIGHT);
  const trace = row.trace;
  chart.dataset.low = view.low;
  chart.dataset.high = view.high;
  chart.replaceChildren(shape("text", { x: 112, y: LANES.compute + 13, "text-anchor": "end" }, row.name));
  chart.append(bottomAxis(x, ROW_HEIGHT - 22, 16, (value) => `${(value * 1e3).toFixed(view.high - view.low < 0.02 ? 1 : 0)} ms`));
  chart.append(bytesArea(trace, x, report.place));
  const end = x(trace.end);
  if (end <= RIGHT && end >= LEFT) chart.append(shape("line", { class: "limit", x1: end, x2: end, y1: 14, y2: ROW_HEIGHT - 22 }));
  trace.layers.forEach((name, index) => {
    box(chart, x, trace.forward[index], LANES.compute, "forward", `F ${name}`);
    box(chart, x, trace.backward[index], LANES.compute, "backward", `B ${name}`);
  });
  box(chart, x, trace.update, LANES.compute, "update", "step");
  for (const [label, from, to, bytes] of trace.operations) {
    const kind = label.slice(0, 2).toLowerCase();
    box(chart, x, [from, to], LANES.operations, kind, label, `, ${(bytes / 1e6).toFixed(2)} MB sent`);
  }
}

// One action; its label is written into it where there is room.
function box(chart, x, [from, to], y, kind, label, more = "") {
  const left = Math.max(LEFT, x(from)), right = Math.min(RIGHT, x(to));
  if (right <= left) return;
  const text = `${label}: ${((to - from) * 1e3).toFixed(2)} ms${more}`;
  const group = shape("g", { class: "action", "data-label": label });
  const width = Math.max(0.5, right - left - 0.5);
  group.append(shape("rect", { class: kind, x: left, y, width, height: LANE_HEIGHT }, shape("title", {}, text)));
  if (width > 8 + 7 * label.length) {
    group.append(shape("text", { x: left + 4, y: y + 13, style: "fill: #fff; pointer-events: none" }, label));
  }
  chart.append(group);
}

// How busy the link is between two samples, as a share of its rate (or of the busiest moment).
function bytesArea(trace, x, place) {
  const rates = [];
  for (let i = 1; i < trace.sent.length; i++) {
    const [t0, n0] = trace.sent[i - 1], [t1, n1] = trace.sent[i];
    rates.push([t0, t1, (n1 - n0) / (t1 - t0)]);
  }
  const group = shape("g");
  const full = place.rate || Math.max(1, ...rates.map((rate) => rate[2]));
  const bottom = LANES.bytes + 24;
  for (const [t0, t1, rate] of rates) {
    const left = Math.max(LEFT, x(t0)), right = Math.min(RIGHT, x(t1));
    const height = Math.min(1, rate / full) * 22;
    if (right > left && height > 0) group.append(shape("rect", { class: "bytes", x: left, y: bottom - height, width: right - left, height }));
  }
  return group;
}

function listen(chart, view, longest, redraw) {
  const seconds = (event) => {
    const frame = chart.getBoundingClientRect();
    return scale(view.low, view.high, LEFT, RIGHT).invert(((event.clientX - frame.left) / frame.width) * 1080);
  };
  chart.addEventListener("wheel", (event) => {
    event.preventDefault();
    const center = seconds(event), factor = event.deltaY < 0 ? 0.8 : 1.25;
    setView(view, center - (center - view.low) * factor, center + (view.high - center) * factor, longest);
    redraw();
  }, { passive: false });
  let grabbed = null;
  chart.addEventListener("pointerdown", (event) => {
    grabbed = seconds(event);
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (grabbed === null) return;
    const shift = grabbed - seconds(event);
    setView(view, view.low + shift, view.high + shift, longest);
    redraw();
  });
  chart.addEventListener("pointerup", () => { grabbed = null; });
  chart.addEventListener("dblclick", () => {
    setView(view, 0, longest, longest);
    redraw();
  });
}

// Keeps the view inside the iteration and at least a tenth of a millisecond wide.
function setView(view, low, high, longest) {
  const width = Math.min(longest, Math.max(1e-4, high - low));
  view.low = Math.min(Math.max(0, low), longest - width);
  view.high = view.low + width;
}
