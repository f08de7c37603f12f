"use strict";
// Bars of iteration times, and scaling curves.

const PALETTE = ["#4c78a8", "#e4572e", "#2b9a8f", "#d98c1f", "#8a6fb0", "#b23a6f", "#6b8e23", "#3d5a80", "#a0522d", "#708090"];

// Horizontal bars, split into compute, overhead and exposed communication.
function bars(report) {
  const rows = report.baselines.filter((row) => row.time !== undefined && row.name !== "wire");
  const width = window.innerWidth < 720 ? 480 : 1080;
  const left = 120, right = width - 80, top = 26, step = 24;
  const bottom = top + rows.length * step;
  const x = scale(0, Math.max(...rows.map((row) => row.high)) * 1.08, left, right);
  const chart = shape("svg", { viewBox: `0 0 ${width} ${bottom + 24}`, class: "bars", role: "img" });
  chart.append(bottomAxis(x, bottom, top, (value) => `${(value * 1e3).toFixed(0)} ms`));
  rows.forEach((row, index) => chart.append(bar(row, x, top + index * step + 3, step - 7)));
  const floor = rows.find((row) => row.name === "floor");
  const limits = [[floor && floor.time, "floor"], [report.bound, "bound"]].filter((pair) => pair[0]).sort((a, b) => a[0] - b[0]);
  // The smaller one's name stands to the left of its line, so that the names never meet.
  limits.forEach(([value, name], index) => chart.append(limit(x(value), top, bottom, name, index ? "start" : "end")));
  return chart;
}

function bar(row, x, y, height) {
  const parts = row.compute === null ? [["exposed", row.time]] : ["compute", "overhead", "exposed"].map((name) => [name, row[name]]);
  const group = shape("g", { "data-baseline": row.name, "data-ms": (row.time * 1e3).toFixed(3) });
  let from = 0;
  for (const [name, seconds] of parts) {
    const box = { class: name, x: x(from), y, width: Math.max(0, x(from + seconds) - x(from)), height, "data-ms": (seconds * 1e3).toFixed(3) };
    group.append(shape("rect", box, shape("title", {}, `${row.name}: ${name} ${ms(seconds)} ms`)));
    from += seconds;
  }
  const middle = y + height / 2;
  group.append(
    shape("line", { x1: x(row.low), x2: x(row.high), y1: middle, y2: middle, stroke: "currentColor" }),
    shape("text", { x: 112, y: middle + 4, "text-anchor": "end" }, row.name),
    shape("text", { x: x(Math.max(row.high, row.time)) + 6, y: middle + 4, class: "value" }, `${ms(row.time)} ms`),
  );
  return group;
}

function limit(x, top, bottom, text, anchor) {
  const shift = anchor === "end" ? -4 : 4;
  return shape("g", {},
    shape("line", { class: "limit", x1: x, x2: x, y1: top - 6, y2: bottom }),
    shape("text", { class: "soft", x: x + shift, y: top - 10, "text-anchor": anchor }, text));
}

// Samples per second over ranks on one kind of link: measured points joined by lines, the simulation dashed. A single
// point is drawn where there is a simulation to compare it with.
function scaling(reports) {
  const simulated = simulatedCurves(reports);
  const measured = measuredCurves(reports).filter((curve) => curve.points.length > 1 || simulated.some((one) => one.name === curve.name));
  const curves = [...measured, ...simulated];
  const points = curves.flatMap((curve) => curve.points);
  const x = scale(0, Math.max(...points.map((point) => Math.log2(point[0]))), 70, 880);
  const y = scale(0, Math.max(...points.map((point) => point[1])) * 1.05, 300, 20);
  const chart = shape("svg", { viewBox: "0 0 1080 330", class: "scaling", role: "img" });
  for (let power = 0; power <= x.high; power++) {
    chart.append(shape("text", { class: "soft", x: x(power), y: 318, "text-anchor": "middle" }, power ? `${2 ** power} ranks` : "1 rank"));
  }
  for (const value of ticks(0, y.high)) {
    chart.append(
      shape("line", { class: "axis", x1: 70, x2: 880, y1: y(value), y2: y(value) }),
      shape("text", { class: "soft", x: 64, y: y(value) + 4, "text-anchor": "end" }, value.toLocaleString("en")));
  }
  const names = [...new Set(curves.map((curve) => curve.name))];
  for (const curve of curves) chart.append(line(curve, x, y, PALETTE[names.indexOf(curve.name) % PALETTE.length]));
  names.forEach((name, index) => {
    const color = PALETTE[index % PALETTE.length];
    chart.append(shape("text", { x: 895, y: 30 + index * 17, style: `fill: ${color}` }, name));
  });
  return chart;
}

function measuredCurves(reports) {
  const names = [...new Set(reports.flatMap((report) => report.baselines.map((row) => row.name)))];
  return names.map((name) => ({ name, simulated: false, points: reports
    .map((report) => [report.place.ranks, (report.baselines.find((row) => row.name === name) || {}).throughput])
    .filter((point) => point[1]).sort((a, b) => a[0] - b[0]) }));
}

function simulatedCurves(reports) {
  const found = reports.find((report) => report.scaling);
  if (!found) return [];
  return Object.entries(found.scaling).map(([name, points]) => ({ name, simulated: true,
    points: points.map(([ranks, seconds]) => [ranks, (ranks * found.job.batch) / seconds]) }));
}

function line(curve, x, y, color) {
  const places = curve.points.map(([ranks, rate]) => [x(Math.log2(ranks)), y(rate)]);
  const group = shape("g", { "data-curve": curve.name, "data-simulated": curve.simulated });
  const way = { points: places.map((place) => place.join(",")).join(" "), style: `stroke: ${color}` };
  group.append(shape("polyline", curve.simulated ? { ...way, class: "simulated" } : way));
  if (curve.simulated) return group;
  places.forEach(([cx, cy], index) => {
    const [ranks, rate] = curve.points[index];
    const text = `${curve.name}, ${ranks} ranks: ${rate.toFixed(1)} per second`;
    group.append(shape("circle", { cx, cy, r: 4, style: `fill: ${color}` }, shape("title", {}, text)));
  });
  return group;
}
