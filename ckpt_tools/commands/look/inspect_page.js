// The tree of the page of `inspect`. Text is set as text everywhere: keys come from strangers.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tree = document.getElementById("tree"), wanted = document.getElementById("wanted");
const MOST = 500;
function make(name, text, parent) {
  const e = document.createElement(name);
  if (text) e.textContent = text;
  if (parent) parent.append(e);
  return e;
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (n >= 1024 && i < 5) { n /= 1024; i++; }
  return (i ? n.toFixed(1) : n) + " " + units[i];
}
const entries = data.tensors.map(t => ({key: t[0], bytes: t[3], tensor: t}))
  .concat(data.objects.map(o => ({key: o[0], bytes: o[1], tensor: null})));
function colour(i) { return "hsl(" + (i * 137.508 % 360).toFixed(0) + " 60% 72%)"; }
function box(c) { return "[" + c[0].map((a, i) => a + ":" + (a + c[1][i])).join(", ") + "]"; }
function drawing(shape, held) {
  let axes = shape.map((n, i) => i).filter(i => held.some(c => c[1][i] < shape[i]));
  if (axes.length < 2) axes = axes.concat(shape.map((n, i) => i).filter(i => !axes.includes(i)));
  axes = axes.slice(0, 2).sort((a, b) => a - b);
  const [down, across] = axes.length > 1 ? axes : [axes[0], null];
  const rows = down === undefined ? 1 : shape[down], columns = across === null || across === undefined ? 1 : shape[across];
  const W = 520, H = 180, NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 " + W + " " + H);
  for (const c of held) {
    const at = (axis, n, whole) => axis === null || axis === undefined ? [0, whole]
      : [c[0][axis] / n * whole, c[1][axis] / n * whole];
    const [y, h] = at(down, rows, H), [x, w] = at(across, columns, W);
    const r = document.createElementNS(NS, "rect");
    for (const [k, v] of [["x", x], ["y", y], ["width", w], ["height", h], ["fill", colour(c[2])], ["stroke", "#fff"]])
      r.setAttribute(k, v);
    const t = document.createElementNS(NS, "title");
    t.textContent = data.files[c[2]] + " " + box(c);
    r.append(t);
    svg.append(r);
    if (w > 80 && h > 14) {
      const text = document.createElementNS(NS, "text");
      text.setAttribute("x", x + 4); text.setAttribute("y", y + 12); text.setAttribute("font-size", 11);
      text.textContent = data.files[c[2]];
      svg.append(text);
    }
  }
  return svg;
}
function chunks(tensor) {
  const place = make("div");
  place.className = "chunks";
  const [, , shape, , count, held] = tensor;
  if (!held) {
    place.textContent = count + " chunks, too many for this page; print-torch-dcp-in-json lists them.";
    return place;
  }
  if (held.length && shape.length) place.append(drawing(shape, held.slice(0, 4096)));
  const table = make("table", "", place);
  for (const c of held.slice(0, MOST)) {
    const row = make("tr", "", table);
    make("td", box(c), row);
    make("td", data.files[c[2]], row);
  }
  if (held.length > MOST) make("p", "and " + (held.length - MOST) + " more", place);
  return place;
}
function lazily(details, fill) {
  details.addEventListener("toggle", () => {
    if (!details.open || details.dataset.full) return;
    details.dataset.full = "1";
    fill(details);
  });
}
function leaf(entry, name, parent) {
  const t = entry.tensor;
  const what = t ? t[1] + " [" + t[2].join(", ") + "], " + bytes(t[3]) + ", " + t[4] + (t[4] === 1 ? " chunk" : " chunks")
    : "object, " + bytes(entry.bytes);
  if (!t) {
    const e = make("div", name + "  ", parent);
    e.className = "leaf";
    make("small", what, e);
    return;
  }
  const details = make("details", "", parent), summary = make("summary", name + "  ", details);
  make("small", what, summary);
  lazily(details, d => d.append(chunks(t)));
}
function branch(list, depth, parent) {
  const groups = new Map();
  for (const e of list) {
    const part = e.key.split(".")[depth];
    if (!groups.has(part)) groups.set(part, []);
    groups.get(part).push(e);
  }
  let left = MOST;
  for (const [part, inside] of groups) {
    if (!left--) { make("p", "and " + (groups.size - MOST) + " more; search for them", parent); break; }
    if (inside.length === 1) { leaf(inside[0], inside[0].key.split(".").slice(depth).join("."), parent); continue; }
    const ends = inside.filter(e => e.key.split(".").length === depth + 1);
    ends.forEach(e => leaf(e, part, parent));
    const rest = inside.filter(e => !ends.includes(e));
    if (!rest.length) continue;
    const details = make("details", "", parent), summary = make("summary", part + "  ", details);
    make("small", rest.length + " keys, " + bytes(rest.reduce((s, e) => s + e.bytes, 0)), summary);
    lazily(details, d => branch(rest, depth + 1, d));
  }
}
function show() {
  const text = wanted.value.trim().toLowerCase();
  tree.replaceChildren();
  const found = text ? entries.filter(e => e.key.toLowerCase().includes(text)) : entries;
  document.getElementById("count").textContent = found.length + " of " + entries.length + " keys";
  if (!text) { branch(entries, 0, tree); return; }
  found.slice(0, MOST).forEach(e => leaf(e, e.key, tree));
  if (found.length > MOST) make("p", "and " + (found.length - MOST) + " more", tree);
}
wanted.addEventListener("input", show);
show();
