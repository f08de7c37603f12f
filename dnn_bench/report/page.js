"use strict";
// Puts the page together from the data.

const HEADINGS = ["baseline", "ms/iter", "range", "per second", "exposed", "link", "sent MB", "predicted", "error",
  "RAM MB", "comm CPU", "/floor", "/limit", "/best peer"];

function figures(report) {
  const table = element("table", {}, element("tr", {}, ...HEADINGS.map((text) => element("th", {}, text))));
  for (const row of report.baselines) {
    const line = element("tr", { class: row.kind, "data-baseline": row.name });
    const texts = row.time === undefined ? [row.name, row.status] : cells(row);
    line.append(...texts.map((text) => element("td", {}, text)));
    if (row.time === undefined) {
      line.append(element("td", { class: "reason", colspan: HEADINGS.length - 2 }, row.reason.split("\n")[0]));
    }
    table.append(line);
  }
  const notes = report.baselines.filter((row) => row.time !== undefined && row.reason)
    .map((row) => element("p", { class: "note" }, `${row.name}: ${row.reason}`));
  return element("div", { class: "wide" }, table, ...notes);
}

function cells(row) {
  const off = row.predicted ? percent(row.predicted / row.time - 1) : "";
  return [row.name, ms(row.time), `${ms(row.low)}-${ms(row.high)}`, fixed(row.throughput, 1), ms(row.exposed),
    percent(row.utilisation), fixed(row.sent / 1e6, 1), ms(row.predicted), off, fixed(row.memory / 1e6, 0), ms(row.communication_cpu),
    fixed(row.to_floor, 2), fixed(row.to_limit, 2), fixed(row.to_best_peer, 2)];
}

function place_of({ place }) {
  return place.links ? `${place.hosts} emulated hosts, links ${links_of(place)}` : `${place.ranks} ranks on one machine`;
}

// Ranks of a host share its link.
function links_of(place) {
  const shared = place.per_host > 1 ? `, each shared by ${place.per_host} ranks` : "";
  return place.links ? [...new Set(place.links)].join(", ") + shared : "none";
}

// Of several reports, one line each: the fastest schedule and the fastest peer.
function overview(reports) {
  const headings = ["model", "where", "floor", "bound", "fastest schedule", "fastest peer", "peer / schedule"];
  const table = element("table", { class: "overview" }, element("tr", {}, ...headings.map((text) => element("th", {}, text))));
  reports.forEach((report, index) => {
    const time = (row) => (row ? `${row.name} ${ms(row.time)}` : "");
    const [floor, ours, peer] = [report.baselines.find((row) => row.name === "floor"), fastest(report, "commsched"), fastest(report, "peer")];
    const gain = ours && peer ? fixed(paired(peer, ours), 2) : "";
    const texts = [place_of(report), ms(floor && floor.time), ms(report.bound), time(ours), time(peer), gain];
    table.append(element("tr", {}, element("td", {}, element("a", { href: `#report${index}` }, report.job.model)),
      ...texts.map((text) => element("td", {}, text))));
  });
  return element("section", {}, element("h1", {}, `${reports.length} comparisons, milliseconds per iteration`),
    element("div", { class: "wide" }, table));
}

// Within repetitions, as `results.fastest` has it, of those that train the same.
function fastest(report, kind) {
  const same = (row) => row.kind === kind && row.time !== undefined && !Object.keys(row.changes || {}).length;
  const rows = report.baselines.filter(same);
  const longest = Math.max(...rows.map((row) => row.times.length));
  const other = rows.find((row) => row.times.length === longest);
  return rows.sort((a, b) => paired(a, other) - paired(b, other))[0];
}

// The median over repetitions of the ratio of two rows, so that the machine's drift cancels.
function paired(row, other) {
  const both = row.times.slice(0, other.times.length);
  const ratios = both.map((time, n) => time / other.times[n]).sort((a, b) => a - b);
  return (ratios[(ratios.length - 1) >> 1] + ratios[ratios.length >> 1]) / 2;
}

function describe(report) {
  const { job, effort, environment: machine } = report;
  const how = `${effort.repetitions} repetitions of ${effort.iterations} iterations, ${effort.interleaved ? "interleaved" : "one baseline after the other"}`;
  const versions = Object.entries(machine.packages).map((pair) => pair.join(" ")).join(", ");
  return [
    element("h1", {}, `${job.model}, ${job.batch} samples per rank`),
    element("p", {}, `${place_of(report)}; ${how}${report.interrupted ? "; interrupted, the figures are partial" : ""}`),
    element("p", {}, `${machine.date}; ${machine.processor}, ${machine.cores} cores; ${versions}`),
    element("p", {}, machine.command),
    ...(report.answer || []).map((sentence) => element("p", { class: "answer" }, sentence)),
  ];
}

function section(report, index) {
  const parts = describe(report);
  parts.push(element("h2", {}, "Iteration time"));
  if (report.baselines.some((row) => row.time !== undefined && row.name !== "wire")) {
    parts.push(legend([["compute", "compute (as without communication)"],
      ["overhead", "overhead (what moving the bytes costs the compute)"], ["exposed", "exposed communication"]]), bars(report));
  }
  parts.push(figures(report));
  if (report.baselines.some((row) => row.trace)) {
    parts.push(element("h2", {}, "One iteration of rank 0"),
      element("p", {}, "Wheel: zoom. Drag: move. Double click: everything. The dashed line is where the next iteration starts."),
      legend([["compute", "forward"], ["backward", "backward"], ["update", "step"], ["rs", "reduce-scatter"], ["ag", "all-gather"],
        ["ar", "all-reduce"], ["bytes", "bytes leaving the host"]]), ...timelines(report));
  }
  return element("section", { id: `report${index}` }, ...parts);
}

function main() {
  const reports = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  if (reports.length > 1) page.append(overview(reports));
  page.append(...reports.map(section));
  const what = (report) => `${report.job.model}, links ${links_of(report.place)}`;
  for (const name of new Set(reports.map(what))) {
    const same = reports.filter((report) => what(report) === name);
    const ranks = new Set(same.map((report) => report.place.ranks));
    if (ranks.size > 1 || same.some((report) => Object.keys(report.scaling || {}).length)) {
      page.append(element("h2", {}, `Scaling of ${name}: samples per second`),
        element("p", {}, "Points are measured, dashed lines are simulated."), scaling(same));
    }
  }
}

main();
