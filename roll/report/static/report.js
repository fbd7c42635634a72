"use strict";
// The page of roll report. Text of models goes into the page as text nodes and attributes alone, never as HTML.

const COLOURS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b"];
const state = { tab: "overview", mode: "logprob", threshold: 0.05, shown: new Set(), sort: null };
const runs = [];

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

async function inflated(id) {
  const text = document.getElementById(id).textContent;
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

const blocks = new Map();
function block(run, number) {
  const key = `s${run}-${number}`;
  if (!blocks.has(key)) {
    if (blocks.size > 60) blocks.delete(blocks.keys().next().value);
    blocks.set(key, inflated(key));
  }
  return blocks.get(key);
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}

function seconds(value) {
  if (value >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;
}

// Curves

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return ticks;
}

function thinned(xs, ys, most) {
  // The least and the greatest value of every stretch, so that no spike is lost.
  if (xs.length <= most) return xs.map((x, i) => i);
  const kept = [];
  const width = Math.ceil(xs.length / (most / 2));
  for (let begin = 0; begin < xs.length; begin += width) {
    let low = begin, high = begin;
    for (let i = begin; i < Math.min(begin + width, xs.length); i++) {
      if (ys[i] === null) continue;
      if (ys[low] === null || ys[i] < ys[low]) low = i;
      if (ys[high] === null || ys[i] > ys[high]) high = i;
    }
    kept.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return kept;
}

function smoothed(ys) {
  let average = 0, total = 0;
  return ys.map((y) => {
    if (y !== null) { average = 0.8 * average + 0.2 * y; total = 0.8 * total + 0.2; }
    return total ? average / total : null;
  });
}

function chart(title, series, options = {}) {
  const W = 420, H = 210, left = 52, right = 10, top = 10, bottom = 24;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const one of series) {
    for (const x of one.xs) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
    for (const ys of [one.ys, one.low || [], one.high || []]) {
      for (const y of ys) { if (y === null) continue; if (y < y0) y0 = y; if (y > y1) y1 = y; }
    }
  }
  const figure = el("figure", { class: "chart", "data-title": title }, el("figcaption", {}, title));
  if (!isFinite(y0)) return (figure.append(el("p", { class: "quiet" }, "no finite values")), figure);
  if (options.unit) { y0 = Math.min(0, y0); y1 = Math.max(1, y1); }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (W - left - right);
  const Y = (y) => H - bottom - ((y - y0) / (y1 - y0)) * (H - top - bottom);
  const plot = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const t of niceTicks(y0, y1, 4)) {
    plot.append(svg("line", { x1: left, x2: W - right, y1: Y(t), y2: Y(t), class: "grid" }));
    const label = svg("text", { x: left - 5, y: Y(t) + 3, class: "tick end" });
    label.textContent = number(t, 3);
    plot.append(label);
  }
  for (const t of niceTicks(x0, x1, 6).filter(Number.isInteger)) {
    const label = svg("text", { x: X(t), y: H - 8, class: "tick middle" });
    label.textContent = t;
    plot.append(label);
  }
  for (const one of series) {
    const kept = thinned(one.xs, one.ys, 800);
    const path = (ys, places) => {
      let d = "", open = false;
      for (const i of places) {
        if (ys[i] === null || ys[i] === undefined) { open = false; continue; }
        d += `${open ? "L" : "M"}${X(one.xs[i]).toFixed(1)},${Y(ys[i]).toFixed(1)}`;
        open = true;
      }
      return d;
    };
    if (one.low && one.high) {
      for (const i of kept) {
        if (one.low[i] === null || one.high[i] === null) continue;
        plot.append(svg("line", { x1: X(one.xs[i]), x2: X(one.xs[i]), y1: Y(one.low[i]), y2: Y(one.high[i]), stroke: one.colour, class: "interval" }));
      }
    }
    const many = one.xs.length > 25;
    if (options.smooth && many) {
      plot.append(svg("path", { d: path(one.ys, kept), stroke: one.colour, class: "line faint" }));
      plot.append(svg("path", { d: path(smoothed(one.ys), kept), stroke: one.colour, class: "line", "stroke-dasharray": one.dash || "" }));
    } else {
      plot.append(svg("path", { d: path(one.ys, kept), stroke: one.colour, class: "line", "stroke-dasharray": one.dash || "" }));
    }
    if (!many) for (const i of kept) if (one.ys[i] !== null) plot.append(svg("circle", { cx: X(one.xs[i]), cy: Y(one.ys[i]), r: 2.5, fill: one.colour }));
  }
  const cursor = svg("line", { y1: top, y2: H - bottom, class: "cursor", visibility: "hidden" });
  plot.append(cursor);
  const readout = el("div", { class: "readout" });
  const rest = () => readout.replaceChildren(...series.slice(0, 8).map((one) => el("span", {}, el("i", { class: "chip", style: { background: one.colour } }), one.label)));
  rest();
  plot.addEventListener("mousemove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * W - left) / (W - left - right) * (x1 - x0);
    let nearest = null;
    const parts = series.slice(0, 8).map((one) => {
      let best = 0;
      for (let i = 1; i < one.xs.length; i++) if (Math.abs(one.xs[i] - at) < Math.abs(one.xs[best] - at)) best = i;
      if (nearest === null || Math.abs(one.xs[best] - at) < Math.abs(nearest - at)) nearest = one.xs[best];
      const interval = one.low && one.low[best] !== null ? ` [${number(one.low[best], 3)}, ${number(one.high[best], 3)}]` : "";
      return el("span", {}, el("i", { class: "chip", style: { background: one.colour } }), `${one.label} ${number(one.ys[best])}${interval}`);
    });
    cursor.setAttribute("x1", X(nearest)); cursor.setAttribute("x2", X(nearest)); cursor.setAttribute("visibility", "visible");
    readout.replaceChildren(el("b", {}, `step ${nearest}`), ...parts);
  });
  plot.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); rest(); });
  figure.append(plot, readout);
  return figure;
}

function matches(key, name) {
  const parts = key.split("/"), own = name.split("/");
  return parts.length === own.length && parts.every((part, i) => part === "*" || part === own[i]);
}

const visible = () => runs.filter((run) => state.shown.has(run.number));

function seriesOf(names) {
  const found = [];
  const several = visible().length > 1;
  for (const run of visible()) {
    names.forEach((name, place) => {
      const data = run.metrics[name];
      if (!data) return;
      const [xs, ys] = data;
      const ends = ["_low", "_high"].map((end) => run.metrics[name + end]);
      const at = (end) => end && xs.map((x) => { const i = end[0].indexOf(x); return i < 0 ? null : end[1][i]; });
      found.push({
        label: several ? (names.length > 1 ? `${run.label}: ${name}` : run.label) : name,
        colour: COLOURS[(several ? run.number : place) % COLOURS.length],
        dash: several && place ? `${2 + 2 * place} 3` : "",
        xs, ys, low: ends[1] && at(ends[0]), high: ends[1] && at(ends[1]),
      });
    });
  }
  return found;
}

const metricNames = () => [...new Set(visible().flatMap((run) => Object.keys(run.metrics)))].filter((name) => !/_(low|high)$/.test(name) || !runs.some((run) => run.metrics[name.replace(/_(low|high)$/, "")]));

// Figures at a glance

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Value of a metric at the end of its run or of the steps up to `last`, with half the width of its 95% interval: that of
// a validation as recorded, of other metrics the mean over the last ten steps and 1.96 standard errors of it.
function ending(run, name, last = Infinity) {
  const [xs, ys] = run.metrics[name] || [[], []];
  const kept = ys.map((y, i) => i).filter((i) => ys[i] !== null && xs[i] <= last);
  if (!kept.length) return null;
  const at = kept[kept.length - 1];
  const [low, high] = ["_low", "_high"].map((end) => run.metrics[name + end]).map((end) => end && end[1][end[0].indexOf(xs[at])]);
  if (typeof low === "number" && typeof high === "number") return { value: ys[at], half: (high - low) / 2, step: xs[at] };
  if (name.startsWith("val/")) return { value: ys[at], half: null, step: xs[at] };
  const values = kept.slice(-10).map((i) => ys[i]);
  const average = mean(values);
  const spread = Math.sqrt(mean(values.map((value) => (value - average) ** 2)) / Math.max(1, values.length - 1));
  return { value: average, half: values.length > 2 ? 1.96 * spread : null, step: xs[at] };
}

function beginning(run, name) {
  const values = ((run.metrics[name] || [[], []])[1]).filter((y) => y !== null);
  return values.length ? (name.startsWith("val/") ? values[0] : mean(values.slice(0, Math.min(10, Math.ceil(values.length / 4))))) : null;
}

function namesOf(panel, all) {
  let names = [...new Set(panel.keys.flatMap((key) => all.filter((name) => matches(key, name))))];
  if (panel.zero_is_none) names = names.filter((name) => seriesOf([name]).some((series) => series.ys.some((value) => value)));
  return panel.first_only ? names.slice(0, 1) : names;
}

const COSTS = [["Seconds a step", "time/step_total"], ["Tokens a second", "system/tps"]];

function tiles(run, all) {
  const box = el("div", { class: "tiles" });
  const tile = (title, value, note) => box.append(el("div", { class: "tile" }, el("span", {}, title), el("b", {}, value), el("span", { class: "quiet" }, note)));
  for (const panel of run.panels.slice(0, 5)) {
    const name = namesOf(panel, all).find((candidate) => candidate in run.metrics);
    const end = name && ending(run, name);
    if (!end) continue;
    const begin = beginning(run, name);
    tile(panel.title, number(end.value, 3), `${end.half === null ? "" : `± ${number(end.half, 2)}, `}${begin === null ? "" : `from ${number(begin, 3)}`}`);
  }
  for (const [title, name] of COSTS) {
    const end = ending(run, name);
    if (end) tile(title, number(end.value, 3), "mean of the last ten steps");
  }
  const memory = Object.entries(run.metrics).filter(([name]) => name.startsWith("memory/")).map(([name, [, ys]]) => [Math.max(...ys.filter((y) => y !== null)), name]).sort((a, b) => b[0] - a[0])[0];
  if (memory && isFinite(memory[0])) tile("Largest memory of a process", `${number(memory[0] / 1e9, 3)} GB`, memory[1].split("/").pop());
  return box;
}

function comparison(all) {
  const compared = visible();
  const first = compared[0];
  const table = el("table", { class: "facts figures" }, el("tr", {}, ["", ...compared.map((run) => run.label), ...compared.slice(1).map((run) => `${run.label} minus ${first.label}`)].map((t) => el("th", {}, t))));
  const rows = [...new Set(compared.flatMap((run) => run.panels.flatMap((panel) => namesOf(panel, all)))), ...COSTS.map(([, name]) => name)];
  const shown = (end) => (end ? `${number(end.value, 3)}${end.half === null ? "" : ` ± ${number(end.half, 2)}`}` : "");
  for (const name of rows) {
    const lasts = compared.map((run) => { const end = ending(run, name); return end && end.step; });
    if (lasts.some((last) => last === null)) continue;
    const last = Math.min(...lasts);
    const ends = compared.map((run) => ending(run, name, last));
    if (ends.some((end) => end === null)) continue;
    const cells = ends.map((end) => el("td", {}, shown(end)));
    for (const end of ends.slice(1)) {
      const difference = end.value - ends[0].value;
      const half = end.half === null || ends[0].half === null ? null : Math.hypot(end.half, ends[0].half);
      const apart = half !== null && Math.abs(difference) > half;
      cells.push(el("td", { class: apart ? "apart" : "" }, shown({ value: difference, half })));
    }
    table.append(el("tr", {}, el("th", {}, `${name}, step ${last}`), cells));
  }
  return el("div", { class: "wide" }, el("h2", {}, "Comparison"), table, el("p", { class: "quiet" }, "At the last step that all runs have, with 95% intervals: those of the validation, and for other metrics those of the mean over the last ten steps. Differences treat the runs as independent; bold where the interval excludes 0."));
}

function overview() {
  const page = el("section", {});
  const facts = el("table", { class: "facts" }, el("tr", {}, ["run", "pipeline", "steps", "duration", "how it ended", "samples here"].map((t) => el("th", {}, t))));
  for (const run of runs) {
    const duration = run.ended && run.began ? seconds(run.ended - run.began) : "";
    const samples = run.left_out ? `${run.samples} (${run.left_out} left out)` : run.samples;
    facts.append(el("tr", {}, [el("span", {}, el("i", { class: "chip", style: { background: COLOURS[run.number % COLOURS.length] } }), run.label), run.pipeline, run.steps, duration, run.outcome || "going on, or ended without a word", samples].map((t) => el("td", {}, t))));
  }
  page.append(el("div", { class: "wide" }, facts));
  const all = metricNames();
  if (visible().length > 1) page.append(comparison(all));
  else for (const run of visible()) page.append(tiles(run, all));
  for (const run of visible()) {
    const box = el("div", { class: "findings" }, el("h2", {}, `Diagnosis${runs.length > 1 ? ` of ${run.label}` : ""}`));
    if (!run.findings.length) box.append(el("p", { class: "quiet" }, "No rule found anything wrong."));
    run.findings.forEach((finding, place) => {
      const list = el("ul", {}, finding.evidence.map((line) => el("li", {}, line)));
      box.append(el("details", { open: place === 0 }, el("summary", {}, el("b", {}, finding.title), ` (${finding.cause})`), list, el("p", {}, el("b", {}, "Remedy: "), finding.remedy)));
    });
    page.append(box);
  }
  const grid = el("div", { class: "grid-of-charts" });
  const drawn = new Set();
  for (const run of visible()) {
    for (const panel of run.panels) {
      if (drawn.has(panel.title)) continue;
      drawn.add(panel.title);
      const names = namesOf(panel, all);
      if (names.length) grid.append(chart(panel.title, seriesOf(names), { unit: panel.unit_range, smooth: panel.smooth }));
    }
  }
  page.append(grid);
  return page;
}

function metricsPage() {
  const grid = el("div", { class: "grid-of-charts" });
  const note = el("p", { class: "quiet" });
  const input = el("input", { type: "search", placeholder: "part of a metric's name, such as kl or token/", id: "metric-filter", value: state.metricFilter || "" });
  const draw = () => {
    state.metricFilter = input.value;
    const names = metricNames().filter((name) => name.includes(input.value)).sort();
    const most = 60;
    note.textContent = `${names.length} metrics${names.length > most ? `, the first ${most} drawn` : ""}`;
    grid.replaceChildren(...names.slice(0, most).map((name) => chart(name, seriesOf([name]))));
  };
  input.addEventListener("input", draw);
  draw();
  return el("section", {}, el("div", { class: "bar" }, input, note), grid);
}

// Samples

const FILTERS = {};
const search = { text: "", hits: null, token: 0 };

function filtered() {
  const found = [];
  const { step0, step1, low, high, finish, domain, tag, kind, errors, prompt } = FILTERS;
  for (const run of visible()) {
    const { size, columns: c, words } = run.index;
    const want = (name, value) => (value === undefined || value === "" ? -1 : words[name].indexOf(value));
    const wants = { finish: want("finish", finish), domain: want("domain", domain), tag: want("tag", tag), kind: want("kind", kind) };
    if ((finish && wants.finish < 0) || (domain && wants.domain < 0) || (tag && wants.tag < 0) || (kind && wants.kind < 0)) continue;
    const hits = search.hits && search.hits.get(run.number);
    for (let i = 0; i < size; i++) {
      if (step0 !== undefined && c.step[i] < step0) continue;
      if (step1 !== undefined && c.step[i] > step1) continue;
      if (low !== undefined && !(c.score[i] !== null && c.score[i] >= low)) continue;
      if (high !== undefined && !(c.score[i] !== null && c.score[i] <= high)) continue;
      if (wants.finish >= 0 && c.finish[i] !== wants.finish) continue;
      if (wants.domain >= 0 && c.domain[i] !== wants.domain) continue;
      if (wants.tag >= 0 && c.tag[i] !== wants.tag) continue;
      if (wants.kind >= 0 && c.kind[i] !== wants.kind) continue;
      if (errors && !c.error[i]) continue;
      if (prompt !== undefined && c.prompt[i] !== prompt) continue;
      if (search.hits && !(hits && hits.has(i))) continue;
      found.push([run.number, i]);
    }
  }
  if (state.sort) {
    const [name, sign] = state.sort;
    const of = ([r, i]) => { const v = runs[r].index.columns[name][i]; return v === null ? -Infinity : v; };
    found.sort((a, b) => sign * (of(a) - of(b)));
  }
  return found;
}

function textOf(content, sample) {
  if (sample.response !== undefined) return sample.response;
  return (sample.tokens || []).map((t) => content.pieces[t]).join("");
}

async function runSearch(text, progress) {
  const token = ++search.token;
  search.text = text;
  if (!text) { search.hits = null; return true; }
  const wanted = text.toLowerCase();
  const hits = new Map();
  for (const run of visible()) {
    const own = new Set();
    const { size, columns: c } = run.index;
    let begin = 0;
    while (begin < size) {
      let end = begin;
      while (end < size && c.block[end] === c.block[begin]) end++;
      const content = await inflated(`s${run.number}-${c.block[begin]}`);
      if (token !== search.token) return false;
      for (let i = begin; i < end; i++) {
        const sample = content.samples[c.place[i]];
        const prompt = content.prompts[sample.prompt];
        if (`${prompt.text || ""}\n${textOf(content, sample)}`.toLowerCase().includes(wanted)) own.add(i);
      }
      begin = end;
      progress(run, begin / size);
    }
    hits.set(run.number, own);
  }
  search.hits = hits;
  return true;
}

const LIST = [
  ["step", "step"], ["kind", "kind"], ["domain", "domain"], ["tag", "tag"], ["score", "score"], ["reward", "norm. reward"],
  ["advantage", "advantage"], ["tokens", "tokens"], ["finish", "finish"], ["logprob", "mean log-prob"], ["mismatch", "max mismatch"], ["version", "version"],
];
const ROW = 24;

function cell(run, name, i) {
  const value = run.index.columns[name][i];
  if (run.index.words[name]) return run.index.words[name][value];
  if (value === null || value === undefined) return "";
  if (name === "logprob") return (value / 1000).toFixed(3);
  if (name === "mismatch") return number(value / 1e5, 3);
  return number(value);
}

// The beginning of a response, filled in when its block of samples is read: the index of a large run has no text.
function says(run, i) {
  const node = el("span", { class: "says" });
  block(run.number, run.index.columns.block[i]).then((content) => {
    const text = textOf(content, content.samples[run.index.columns.place[i]]).slice(0, 400);
    node.textContent = text.replace(/\s+/g, " ").trim().slice(0, 160);
    node.title = text;
  });
  return node;
}

function samplesPage() {
  const count = el("span", { id: "sample-count", class: "quiet" });
  const list = el("div", { class: "rows" });
  const spacer = el("div", {});
  const viewport = el("div", { class: "viewport", id: "samples" }, spacer);
  spacer.append(list);
  const detail = el("div", { class: "detail", id: "detail" }, el("p", { class: "quiet" }, "Choose a sample: its whole group is shown side by side."));
  let rows = [];
  const used = LIST.filter(([name]) => visible().some((run) => { const c = run.index.columns[name]; const w = run.index.words[name]; return w ? w.some((x) => x) : c.some((v) => v !== null && v !== undefined); }));
  const columns = `${runs.length > 1 ? "minmax(80px, 1fr) " : ""}${used.map(() => "minmax(52px, 1fr)").join(" ")} minmax(180px, 6fr)`;
  const draw = () => {
    const first = Math.max(0, Math.floor(viewport.scrollTop / ROW) - 5);
    const last = Math.min(rows.length, first + Math.ceil((viewport.clientHeight || 400) / ROW) + 10);
    list.style.transform = `translateY(${first * ROW}px)`;
    list.replaceChildren(...rows.slice(first, last).map(([r, i]) => {
      const run = runs[r];
      const cells = [...used.map(([name]) => el("span", {}, cell(run, name, i))), says(run, i)];
      if (runs.length > 1) cells.unshift(el("span", {}, el("i", { class: "chip", style: { background: COLOURS[r % COLOURS.length] } }), run.label));
      const chosen = state.chosen && state.chosen[0] === r && state.chosen[1] === i;
      return el("div", { class: `row${run.index.columns.error[i] ? " bad" : ""}${chosen ? " chosen" : ""}`, style: { gridTemplateColumns: columns }, onclick: () => { state.chosen = [r, i]; draw(); showGroup(detail, r, i, refresh); } }, cells);
    }));
  };
  const refresh = () => {
    rows = filtered();
    spacer.style.height = `${rows.length * ROW}px`;
    const total = visible().reduce((sum, run) => sum + run.index.size, 0);
    count.textContent = `${rows.length} of ${total} samples`;
    viewport.scrollTop = 0;
    draw();
  };
  viewport.addEventListener("scroll", draw);
  const head = el("div", { class: "row head", style: { gridTemplateColumns: columns } }, runs.length > 1 ? el("span", {}, "run") : null, used.map(([name, title]) => el("span", { onclick: () => { state.sort = state.sort && state.sort[0] === name && state.sort[1] < 0 ? [name, 1] : [name, -1]; refresh(); }, title: "sort" }, title)), el("span", {}, "response"));
  const page = el("section", { class: "samples" }, filterBar(refresh, count), el("div", { class: "table" }, head, viewport), detail);
  requestAnimationFrame(refresh);
  return page;
}

function filterBar(refresh, count) {
  const numeric = (key, label) => el("label", {}, label, el("input", { type: "number", step: "any", id: `f-${key}`, value: FILTERS[key] ?? "", oninput: (event) => { FILTERS[key] = event.target.value === "" ? undefined : Number(event.target.value); refresh(); } }));
  const choice = (key) => {
    const words = [...new Set(runs.flatMap((run) => run.index.words[key]))].filter((word) => word).sort();
    if (words.length < 2) return null;
    return el("label", {}, key, el("select", { id: `f-${key}`, onchange: (event) => { FILTERS[key] = event.target.value; refresh(); } }, el("option", { value: "" }, "all"), words.map((word) => el("option", { value: word, selected: FILTERS[key] === word }, word))));
  };
  const text = el("input", { type: "search", id: "f-text", placeholder: "text in prompt or response", value: search.text });
  const note = el("span", { class: "quiet", id: "search-note" });
  const find = async () => {
    note.textContent = "searching";
    const done = await runSearch(text.value, (run, share) => { note.textContent = `searching ${Math.round(share * 100)}%`; });
    if (done) { note.textContent = ""; refresh(); }
  };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter") find(); });
  text.addEventListener("search", find);
  const reset = el("button", { id: "f-reset", onclick: () => { for (const key of Object.keys(FILTERS)) delete FILTERS[key]; search.text = ""; search.hits = null; search.token++; state.sort = null; show(); } }, "reset");
  return el("div", { class: "bar" }, el("span", {}, "steps ", numeric("step0", ""), " to ", numeric("step1", "")), el("span", {}, "score ", numeric("low", ""), " to ", numeric("high", "")), ["kind", "domain", "tag", "finish"].map(choice), el("label", {}, el("input", { type: "checkbox", id: "f-errors", checked: Boolean(FILTERS.errors), onchange: (event) => { FILTERS.errors = event.target.checked; refresh(); } }), "with errors"), text, el("button", { id: "f-find", onclick: find }, "search"), reset, note, count);
}

const MODES = { logprob: "log-prob", mismatch: "engine/trainer mismatch", advantage: "advantage", route: "expert", plain: "no colours" };

async function showGroup(detail, r, i, refresh) {
  const run = runs[r];
  const c = run.index.columns;
  const content = await block(r, c.block[i]);
  run.images = run.images || await inflated(`p${r}`);
  const chosen = content.samples[c.place[i]];
  const prompt = content.prompts[chosen.prompt];
  const members = [];
  for (let j = i; j >= 0 && c.block[j] === c.block[i]; j--) if (c.group[j] === c.group[i]) members.unshift(j);
  for (let j = i + 1; j < run.index.size && c.block[j] === c.block[i]; j++) if (c.group[j] === c.group[i]) members.push(j);
  const draw = () => {
    const select = el("select", { id: "token-mode", onchange: (event) => { state.mode = event.target.value; draw(); } }, Object.entries(MODES).map(([key, title]) => el("option", { value: key, selected: key === state.mode }, title)));
    const limit = el("input", { type: "number", step: "any", id: "mismatch-limit", value: state.threshold, onchange: (event) => { state.threshold = Number(event.target.value); draw(); } });
    const same = visible().reduce((sum, other) => sum + other.index.columns.prompt.filter((p) => p === c.prompt[i]).length, 0);
    const elsewhere = same > members.length ? el("button", { id: "same-prompt", onclick: () => { FILTERS.prompt = FILTERS.prompt === undefined ? c.prompt[i] : undefined; refresh(); } }, `${same} samples of this prompt in all steps and runs: show them alone, or all again`) : null;
    const about = [`step ${c.step[i]}`, prompt.domain, prompt.tag, prompt.id ? `prompt ${prompt.id}` : null, prompt.truth !== undefined ? `ground truth ${prompt.truth}` : null].filter((x) => x);
    detail.replaceChildren(
      el("div", { class: "bar" }, el("b", {}, about.join(" · ")), el("label", {}, "tokens by ", select), el("label", {}, "first token with a mismatch above ", limit), elsewhere),
      pictures(run, prompt.images),
      el("pre", { class: "prompt" }, prompt.text || ""),
      el("div", { class: "cards" }, members.map((j) => card(run, content, content.samples[c.place[j]], j === i))),
    );
    const mark = detail.querySelector(".card.chosen");
    mark.parentElement.scrollLeft = mark.offsetLeft - mark.parentElement.offsetLeft - 330;
  };
  draw();
}

function pictures(run, names) {
  return el("div", { class: "pictures" }, (names || []).map((name) => run.images[name] ? el("img", { src: `data:image/png;base64,${run.images[name]}`, alt: name, title: name }) : el("span", { class: "quiet" }, name)));
}

function card(run, content, sample, chosen) {
  const facts = [];
  const fact = (name, value) => { if (value !== undefined && value !== null && value !== "") facts.push(el("span", { class: "fact" }, el("b", {}, name), ` ${typeof value === "number" ? number(value) : value}`)); };
  fact("", sample.kind);
  fact("score", sample.score);
  fact("normalised", sample.reward);
  if (typeof sample.advantages === "number") fact("advantage", sample.advantages);
  fact("tokens", sample.response_tokens);
  fact("finish", sample.finish_reason);
  fact("outcome", sample.outcome);
  fact("role", sample.role);
  fact("weights", Array.isArray(sample.versions) ? sample.versions.map(([v, n]) => `${v} (${n} tokens)`).join(", ") : sample.versions);
  for (const [name, value] of Object.entries(sample.metrics || {})) if (name !== "score") fact(name, value);
  if (sample.mismatch) {
    const first = sample.mismatch.findIndex((q) => Math.abs(q) / 1e5 > state.threshold);
    fact("first mismatch", first < 0 ? "none" : `token ${first}: ${content.pieces[sample.tokens[first]]} by ${number(sample.mismatch[first] / 1e5, 3)}`);
  }
  const body = el("div", { class: "response" });
  if (sample.tokens) tokens(body, content, sample, 1500);
  else body.append(sample.response || "");
  return el("article", { class: `card${chosen ? " chosen" : ""}` }, el("header", {}, facts), sample.error ? el("p", { class: "error" }, sample.error) : null, sample.images ? pictures(run, sample.images) : null, body);
}

function colour(sample, i, scale) {
  if (state.mode === "logprob") {
    const values = sample.log_probs || sample.ref_log_probs;
    if (!values) return "";
    return `rgba(220, 38, 38, ${Math.min(0.85, Math.max(0, -values[i] / 1000) / 5).toFixed(3)})`;
  }
  if (state.mode === "mismatch" && sample.mismatch) {
    const size = Math.abs(sample.mismatch[i]) / 1e5;
    return size ? `rgba(147, 51, 234, ${Math.min(0.85, Math.max(0, (Math.log10(size) + 5) / 5)).toFixed(3)})` : "";
  }
  if (state.mode === "advantage" && sample.advantages !== undefined) {
    const value = (Array.isArray(sample.advantages) ? sample.advantages[i] : sample.advantages) / scale;
    const strength = Math.min(0.7, Math.abs(value) * 0.5).toFixed(3);
    return value >= 0 ? `rgba(22, 163, 74, ${strength})` : `rgba(220, 38, 38, ${strength})`;
  }
  if (state.mode === "route" && sample.experts && sample.experts[i]) return `hsl(${(sample.experts[i][0] * 137.508) % 360} 70% 60% / 45%)`;
  return "";
}

function tokens(body, content, sample, most) {
  const given = new Uint8Array(sample.tokens.length);
  for (const [begin, end] of sample.given || []) given.fill(1, begin, end);
  const begins = new Map((sample.turns || []).map(([begin, end, reward], turn) => [begin, [turn, reward]]));
  const scale = Array.isArray(sample.advantages) ? Math.max(1e-9, ...sample.advantages.map(Math.abs)) : 1;
  const wrong = sample.mismatch ? sample.mismatch.findIndex((q) => Math.abs(q) / 1e5 > state.threshold) : -1;
  const shown = Math.min(sample.tokens.length, most);
  for (let i = 0; i < shown; i++) {
    if (begins.has(i)) {
      const [turn, reward] = begins.get(i);
      body.append(el("span", { class: "turn" }, `turn ${turn}, reward ${number(reward)}`));
    }
    const piece = content.pieces[sample.tokens[i]];
    const about = [`token ${i}: ${JSON.stringify(piece)} (id ${content.ids[sample.tokens[i]]})`];
    if (!given[i]) {
      if (sample.log_probs) about.push(`log-prob ${(sample.log_probs[i] / 1000).toFixed(3)}`);
      if (sample.ref_log_probs) about.push(`log-prob under the reference ${(sample.ref_log_probs[i] / 1000).toFixed(3)}`);
      if (sample.mismatch) about.push(`trainer minus engine ${number(sample.mismatch[i] / 1e5, 3)}`);
      if (Array.isArray(sample.advantages)) about.push(`advantage ${number(sample.advantages[i])}`);
    } else about.push("given, not sampled");
    if (sample.experts && sample.experts[i]) about.push(`experts of the last layer ${sample.experts[i].join(", ")}`);
    const node = el("span", { class: `token${given[i] ? " given" : ""}${i === wrong ? " wrong" : ""}`, title: about.join("\n") }, piece === "" ? "\u2205" : piece);
    const background = given[i] ? "" : colour(sample, i, scale);
    if (background) node.style.backgroundColor = background;
    body.append(node);
  }
  if (sample.tokens.length > shown) body.append(el("button", { onclick: (event) => { event.target.remove(); body.replaceChildren(); tokens(body, content, sample, sample.tokens.length); } }, `show ${sample.tokens.length - shown} more tokens`));
  else if (sample.cut) body.append(el("span", { class: "quiet" }, ` (${sample.cut} tokens are not in the record)`));
}

// Timeline

function merged(spans) {
  const sorted = spans.slice().sort((a, b) => a[0] - b[0]);
  const found = [];
  for (const [begin, end] of sorted) {
    if (found.length && begin <= found[found.length - 1][1]) found[found.length - 1][1] = Math.max(found[found.length - 1][1], end);
    else found.push([begin, end]);
  }
  return found;
}

function timelinePage() {
  const page = el("section", {});
  for (const run of visible()) page.append(timelineOf(run));
  return page;
}

function timelineOf(run) {
  const { steps, workers } = run.timeline;
  const box = el("div", { class: "timeline" }, el("h2", {}, run.label));
  if (!steps.length) return (box.append(el("p", { class: "quiet" }, "This run has recorded no timeline.")), box);
  const lanes = [["driver: phases", steps.flatMap((row) => row.phases.map(([name, begin, length]) => [name, begin, begin + length]))]];
  const devices = new Map();
  for (const worker of workers) {
    const spans = worker.spans.map(([m, begin, length]) => [`${worker.role}.${worker.methods[m]}`, begin, begin + length]);
    const names = worker.devices.length ? worker.devices.map((d) => `device ${d}`) : [`${worker.role}-${worker.rank} (no device)`];
    for (const name of names) devices.set(name, (devices.get(name) || []).concat([[worker, spans]]));
  }
  for (const [name, parts] of [...devices].sort((a, b) => a[0].localeCompare(b[0], undefined, { numeric: true }))) {
    for (const [worker, spans] of parts) lanes.push([parts.length > 1 ? `${name}: ${worker.role}-${worker.rank}` : `${name}${worker.devices.length ? `: ${worker.role}-${worker.rank}` : ""}`, spans]);
  }
  const real = steps.filter((row) => row.step >= 0);
  const last = real.length - 1;
  const from = el("input", { type: "number", min: 0, value: real.length ? real[Math.max(0, last - 3)].step : 0 });
  const to = el("input", { type: "number", min: 0, value: real.length ? real[last].step : 0 });
  const canvas = el("canvas", { class: "lanes" });
  const tip = el("div", { class: "readout" });
  const table = el("div", {});
  const names = [...new Set(lanes.flatMap(([, spans]) => spans.map(([name]) => name.split(".")[0])))];
  const colourOf = (name) => COLOURS[names.indexOf(name.split(".")[0]) % COLOURS.length];
  let hits = [];
  const draw = () => {
    const chosen = real.filter((row) => row.step >= Number(from.value) && row.step <= Number(to.value));
    const t0 = chosen.length ? Math.min(...chosen.map((row) => row.begin)) : steps[0].begin;
    const t1 = chosen.length ? Math.max(...chosen.map((row) => row.end)) : steps[steps.length - 1].end;
    const width = Math.max(700, box.clientWidth - 20), left = 210, height = 26 * lanes.length + 30;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    const X = (t) => left + ((t - t0) / (t1 - t0 || 1)) * (width - left - 10);
    hits = [];
    context.fillStyle = inked("quiet");
    for (const t of niceTicks(0, t1 - t0, 8)) { context.fillText(seconds(t), X(t0 + t), height - 8); context.fillRect(X(t0 + t), 0, 0.5, height - 22); }
    const summary = [];
    lanes.forEach(([name, spans], lane) => {
      const inside = spans.filter(([, begin, end]) => end > t0 && begin < t1);
      const busy = merged(inside.map(([, begin, end]) => [Math.max(t0, begin), Math.min(t1, end)])).reduce((sum, [a, b]) => sum + b - a, 0);
      summary.push([name, busy, inside]);
      context.fillStyle = inked("text");
      context.fillText(name.length > 30 ? `${name.slice(0, 29)}…` : name, 4, lane * 26 + 17);
      context.fillStyle = inked("hover");
      context.fillRect(left, lane * 26 + 3, width - left - 10, 20);
      // Longer spans first, so that phases inside phases stay visible.
      for (const [label, begin, end] of inside.slice().sort((a, b) => b[2] - b[1] - (a[2] - a[1]))) {
        const x = X(Math.max(t0, begin)), w = Math.max(0.7, X(Math.min(t1, end)) - x);
        context.fillStyle = colourOf(label);
        context.fillRect(x, lane * 26 + 3, w, 20);
        hits.push([lane, x, x + w, label, end - begin]);
        const text = label.split(".").pop().replace(/^step_/, "");
        if (w > context.measureText(text).width + 6) { context.fillStyle = "#fff"; context.fillText(text, x + 3, lane * 26 + 17); }
      }
    });
    const window_ = t1 - t0;
    table.replaceChildren(el("table", { class: "facts" }, el("tr", {}, ["where", "busy", "idle", "most of it"].map((t) => el("th", {}, t))), summary.map(([name, busy, inside]) => {
      const totals = new Map();
      for (const [label, begin, end] of inside) totals.set(label, (totals.get(label) || 0) + Math.min(t1, end) - Math.max(t0, begin));
      const most = [...totals].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([label, total]) => `${label.split(".").pop()} ${seconds(total)}`).join(", ");
      return el("tr", {}, [name, `${((100 * busy) / window_).toFixed(0)}%`, `${(100 - (100 * busy) / window_).toFixed(0)}% (${seconds(window_ - busy)})`, most].map((t) => el("td", {}, t)));
    })));
  };
  canvas.addEventListener("mousemove", (event) => {
    const lane = Math.floor(event.offsetY / 26);
    const over = hits.filter(([l, a, b]) => l === lane && event.offsetX >= a && event.offsetX <= b).pop();
    tip.textContent = over ? `${over[3]}: ${seconds(over[4])}` : "";
  });
  for (const input of [from, to]) input.addEventListener("change", draw);
  box.append(el("div", { class: "bar" }, el("label", {}, "steps ", from), el("label", {}, "to ", to), tip), el("div", { class: "wide" }, canvas), el("div", { class: "wide" }, table));
  requestAnimationFrame(draw);
  return box;
}

// Configuration

function configPage() {
  const keys = [...new Set(runs.flatMap((run) => [...Object.keys(run.config), ...Object.keys(run.defaults)]))].sort();
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const value = (run, key) => (key in run.config ? text(run.config[key]) : key in run.defaults ? text(run.defaults[key]) : "(not set)");
  const shown = (run, key) => [value(run, key), key in run.config || !(key in run.defaults) ? "" : el("span", { class: "quiet" }, " default")];
  const differs = (key) => new Set(runs.map((run) => value(run, key))).size > 1;
  const table = el("table", { class: "facts config" });
  const only = el("input", { type: "checkbox", id: "config-differences", checked: runs.length > 1 });
  const input = el("input", { type: "search", placeholder: "part of a key", id: "config-filter" });
  const draw = () => {
    const kept = keys.filter((key) => key.includes(input.value) && (!only.checked || differs(key)));
    table.replaceChildren(el("tr", {}, ["key", ...runs.map((run) => run.label)].map((t) => el("th", {}, t))), ...kept.map((key) => el("tr", { class: runs.length > 1 && differs(key) ? "differs" : "" }, el("td", {}, key), runs.map((run) => el("td", {}, shown(run, key))))));
    if (!kept.length) table.append(el("tr", {}, el("td", {}, only.checked ? "no differences" : "no such key")));
  };
  input.addEventListener("input", draw);
  only.addEventListener("change", draw);
  draw();
  return el("section", {}, el("div", { class: "bar" }, input, runs.length > 1 ? el("label", {}, only, "differences only") : null), el("div", { class: "wide" }, table));
}

// The frame

const TABS = { overview: ["Overview", overview], metrics: ["All metrics", metricsPage], samples: ["Samples", samplesPage], timeline: ["Timeline", timelinePage], config: ["Configuration", configPage] };

// The reader's choice, or what the system prefers. A page opened from a file may have no storage.
function theme(chosen) {
  let kept = null;
  try {
    if (chosen) localStorage.setItem("roll-report-theme", chosen);
    kept = localStorage.getItem("roll-report-theme");
  } catch { kept = chosen; }
  document.documentElement.dataset.theme = chosen || kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
const inked = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function show() {
  const app = document.getElementById("app");
  const tabs = el("nav", {}, Object.entries(TABS).map(([key, [title]]) => el("button", { class: key === state.tab ? "current" : "", id: `tab-${key}`, onclick: () => { state.tab = key; show(); } }, title)));
  const legend = runs.length > 1 ? el("span", { class: "legend" }, runs.map((run) => el("label", {}, el("input", { type: "checkbox", checked: state.shown.has(run.number), onchange: (event) => { event.target.checked ? state.shown.add(run.number) : state.shown.delete(run.number); show(); } }), el("i", { class: "chip", style: { background: COLOURS[run.number % COLOURS.length] } }), run.label))) : null;
  const dark = document.documentElement.dataset.theme === "dark";
  const toggle = el("button", { id: "theme", onclick: () => { theme(dark ? "light" : "dark"); show(); } }, dark ? "light" : "dark");
  app.replaceChildren(el("header", { class: "top" }, el("h1", {}, runs.map((run) => run.label).join(" / ")), tabs, legend, toggle), TABS[state.tab][1](), el("footer", { class: "quiet" }, state.made));
}

async function start() {
  theme();
  const about = await inflated("about");
  state.made = `written ${about.made} by roll ${about.version}`;
  await Promise.all(about.runs.map(async (run, place) => {
    const [index, metrics, timeline] = await Promise.all(["i", "m", "t"].map((kind) => inflated(`${kind}${place}`)));
    runs[place] = { ...run, number: place, index, metrics, timeline, images: null };
  }));
  runs.forEach((run) => state.shown.add(run.number));
  show();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  document.getElementById("app").textContent = `The report cannot be shown: ${error}`;
  throw error;
});
