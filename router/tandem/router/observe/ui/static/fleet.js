// The picture: router, prefill and decode workers, what flows between them, and who waits.

import { byId, bytes, html, ms, number, svg } from "./draw.js";

const MOST = 10; // workers of a role that are drawn; the others are counted
const BOX = { width: 218, height: 84, gap: 18 };
const WIDTH = 1060;
const X = { router: 12, prefill: 374, decode: 790 };
const TRIP_S = 1.6; // seconds that a dot takes along its way
const MOST_DOTS = 9;
const APART = 0.37; // of a trip, between the dots of two ways
const MOST_LINKS = MOST * MOST;
const LABELLED = 2; // links that have words of their own
const TOP = 26;

let flows = []; // {path, length, dots, speed, kind}
let dots = null;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export function drawFleet(fleet) {
  const shown = { prefill: pick(fleet, "prefill"), decode: pick(fleet, "decode") };
  const rows = Math.max(shown.prefill.length, shown.decode.length, 1);
  const height = TOP + rows * (BOX.height + BOX.gap) + 34;
  const places = new Map();
  for (const role of ["prefill", "decode"]) place(shown[role], X[role], height, places);
  const middle = { x: X.router, y: TOP + (height - TOP - 34 - BOX.gap - 104) / 2, height: 104, width: 176 };
  const ways = svg("g", { class: "ways" });
  const boxes = svg("g", { class: "boxes" });
  flows = [];
  drawWays(fleet, shown, places, middle, height, ways);
  boxes.append(routerBox(fleet, middle));
  for (const worker of [...shown.prefill, ...shown.decode]) {
    boxes.append(workerBox(worker, places.get(worker.incarnation)));
  }
  boxes.append(...restOf(fleet.workers, shown, height));
  dots = svg("g", { class: "dots" });
  const picture = byId("fleet");
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  picture.replaceChildren(ways, dots, boxes);
  moveDots(performance.now());
}

export function animate() {
  const step = (now) => {
    if (!still.matches && dots) moveDots(now);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

function pick(fleet, role) {
  const byName = (a, b) => a.name.localeCompare(b.name);
  const bad = fleet.handoff_links.filter((each) => each.state !== "up");
  const ends = new Set(bad.flatMap((each) => [each.prefill, each.decode]));
  const isWell = (each) => (each.health === "up" && !ends.has(each.incarnation) ? 1 : 0);
  const all = fleet.workers.filter((each) => each.role === role);
  // Those in trouble are among the drawn, however many there are.
  all.sort((a, b) => isWell(a) - isWell(b) || byName(a, b));
  return all.slice(0, MOST).sort(byName);
}

function place(workers, x, height, places) {
  const whole = workers.length * (BOX.height + BOX.gap) - BOX.gap;
  const top = TOP + (height - TOP - 34 - BOX.gap - whole) / 2;
  workers.forEach((each, index) => {
    places.set(each.incarnation, { x, y: top + index * (BOX.height + BOX.gap) });
  });
}

function drawWays(fleet, shown, places, middle, height, ways) {
  const begin = [middle.x + middle.width, middle.y + middle.height / 2];
  const into = shown.prefill.length ? shown.prefill : shown.decode;
  for (const worker of into) {
    const at = places.get(worker.incarnation);
    const share = worker.prompt_tokens_per_s ?? 0;
    ways.append(way(curve(begin, [at.x, at.y + BOX.height / 2]), "prompt", share / 200, ""));
  }
  const links = fleet.handoff_links.filter((e) => places.has(e.prefill) && places.has(e.decode));
  const labelled = links.length <= LABELLED;
  for (const link of links.slice(0, MOST_LINKS)) {
    const from = places.get(link.prefill);
    const to = places.get(link.decode);
    const ends = [
      [from.x + BOX.width, from.y + BOX.height / 2],
      [to.x, to.y + BOX.height / 2],
    ];
    const rate = link.state === "up" ? link.handoffs_per_s + link.underway : 0;
    ways.append(way(curve(...ends), `kv ${link.state}`, rate, wordsOf(link)));
    if (labelled) ways.append(label(link, ends));
  }
  if (!labelled) ways.append(caption(fleet.handoff_links));
  for (const worker of shown.decode) {
    const at = places.get(worker.incarnation);
    const out = [at.x + BOX.width, at.y + BOX.height / 2];
    const low = height - 16;
    const side = WIDTH - 14;
    const back = `M${out} H${side - 8} Q${side} ${out[1]} ${side} ${out[1] + 8} V${low - 8} Q${side} ${low} ${side - 8} ${low} H108 Q100 ${low} 100 ${low - 8} V${middle.y + middle.height}`;
    ways.append(way(back, "tokens", (worker.generated_tokens_per_s ?? 0) / 25, ""));
  }
}

function curve([x1, y1], [x2, y2]) {
  const bend = (x2 - x1) / 2;
  return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

/** One way, as wide as it is busy, with dots on it while anything moves. */
function way(shape, kind, rate, words) {
  const width = 1.5 + Math.min(4, Math.log2(1 + rate));
  const path = svg("path", { d: shape, class: `way ${kind}`, "stroke-width": width.toFixed(2) });
  if (words) path.append(svg("title", {}, words));
  const count = rate > 0.02 ? Math.min(MOST_DOTS, Math.ceil(Math.log2(1 + rate) * 1.6)) : 0;
  if (count) flows.push({ path, length: 0, count, kind: kind.split(" ")[0] });
  return path;
}

/** What one link moves KV by, where there are few enough that words find room. */
function label(link, [from, to]) {
  const x = (from[0] + to[0]) / 2;
  const y = (from[1] + to[1]) / 2;
  const words = link.state === "up" ? (link.transport ?? "up") : link.state;
  const speed = link.gb_per_s ? `${number(link.gb_per_s, 2)} GB/s` : "";
  return svg(
    "g",
    { class: `link-label ${link.state}` },
    svg("text", { x, y: y - 9, "text-anchor": "middle" }, words),
    svg("text", { x, y: y + 19, "text-anchor": "middle" }, speed),
  );
}

/** The same of many links, in one line above them. */
function caption(links) {
  const up = links.filter((each) => each.state === "up");
  const kinds = [...new Set(up.map((each) => each.transport))].filter(Boolean).join(", ");
  const best = Math.max(0, ...up.map((each) => each.gb_per_s));
  const speed = best ? `, up to ${number(best, 2)} GB/s` : "";
  const words = `${up.length} of ${links.length} links up, ${kinds || "no transport"}${speed}`;
  const x = (X.prefill + BOX.width + X.decode) / 2;
  const look = up.length < links.length ? "link-label resting" : "link-label";
  return svg("g", { class: look }, svg("text", { x, y: 16, "text-anchor": "middle" }, words));
}

function wordsOf(link) {
  const reason = link.reason ? ` (${link.reason})` : "";
  return `${link.state}${reason}, ${link.transport ?? "no transport"}, ${link.handoffs} hand-offs`;
}

function routerBox(fleet, at) {
  const queue = fleet.queue;
  const rows = [
    [`${number(queue.running)} under way`, "big"],
    [`${number(queue.waiting)} in its queue`, queue.waiting ? "warn" : "dim"],
    [`${number(fleet.rates.requests_per_s, 1)} requests/s`, "dim"],
  ];
  return box("router", "router", at, at.width, at.height, rows, []);
}

function workerBox(worker, at) {
  const busy = `${worker.running} of ${worker.max_running} run`;
  const rate = worker.role === "prefill" ? worker.prompt_tokens_per_s : worker.generated_tokens_per_s;
  const what = worker.role === "prefill" ? "prompt tokens/s" : "tokens/s";
  const rows = [
    [`${number(rate)} ${what}`, "big"],
    [worker.waiting ? `${busy}, ${worker.waiting} wait` : busy, worker.waiting ? "warn" : "dim"],
  ];
  const name = worker.pod || worker.endpoint;
  const group = box(worker.role, name, at, BOX.width, BOX.height, rows, meter(worker, at));
  if (worker.health !== "up") {
    group.classList.add("troubled");
    const where = { x: at.x + BOX.width - 10, y: at.y + 60, "text-anchor": "end", class: "warn" };
    group.append(svg("text", where, worker.health));
  }
  return group;
}

function meter(worker, at) {
  if (worker.kv_use === null) return [];
  const [x, y, width] = [at.x + 12, at.y + BOX.height - 14, BOX.width - 86];
  const use = Math.min(1, Math.max(0, worker.kv_use));
  const full = use >= 0.95 ? "full" : use >= 0.8 ? "high" : "";
  return [
    svg("rect", { x, y, width, height: 5, rx: 2.5, class: "meter" }),
    svg("rect", { x, y, width: width * use, height: 5, rx: 2.5, class: `meter-used ${full}` }),
    svg("text", { x: x + width + 8, y: y + 6, class: "small" }, `KV ${number(100 * use)} %`),
  ];
}

function box(kind, name, at, width, height, rows, more) {
  const short = name.length > 28 ? `…${name.slice(-27)}` : name;
  const lines = rows.map(([words, look], index) =>
    svg("text", { x: at.x + 12, y: at.y + 41 + index * (kind === "router" ? 23 : 19), class: look }, words),
  );
  return svg(
    "g",
    { class: `box ${kind}`, "data-name": name },
    svg("rect", { x: at.x, y: at.y, width, height, rx: 9 }),
    svg("rect", { x: at.x, y: at.y + 8, width: 4, height: height - 16, rx: 2, class: "edge" }),
    svg("text", { x: at.x + 12, y: at.y + 20, class: "name" }, kind === "router" ? name : `${kind} ${short}`),
    ...lines,
    ...more,
  );
}

function restOf(workers, shown, height) {
  return ["prefill", "decode"].flatMap((role) => {
    const more = workers.filter((each) => each.role === role).length - shown[role].length;
    const where = { x: X[role] + BOX.width / 2, y: height - 26, "text-anchor": "middle", class: "dim" };
    return more > 0 ? [svg("text", where, `and ${more} ${role} workers more`)] : [];
  });
}

function moveDots(now) {
  const at = still.matches ? 0.5 : (now / 1000 / TRIP_S) % 1;
  const wanted = flows.flatMap((flow, number) => {
    flow.length ||= flow.path.getTotalLength();
    const slow = flow.kind === "tokens" ? 3 : 1;
    const begin = still.matches ? at : (now / 1000 / (TRIP_S * slow)) % 1;
    return Array.from({ length: flow.count }, (_, index) => {
      const share = (begin + index / flow.count + number * APART) % 1;
      return { point: flow.path.getPointAtLength(share * flow.length), kind: flow.kind };
    });
  });
  while (dots.childElementCount < wanted.length) dots.append(svg("circle", { r: 3 }));
  while (dots.childElementCount > wanted.length) dots.lastElementChild.remove();
  wanted.forEach(({ point, kind }, index) => {
    const dot = dots.children[index];
    dot.setAttribute("class", `dot ${kind}`);
    dot.setAttribute("cx", point.x.toFixed(1));
    dot.setAttribute("cy", point.y.toFixed(1));
    dot.setAttribute("r", kind === "kv" ? 4.5 : 3);
  });
}

export function drawLinks(fleet) {
  const names = new Map(fleet.workers.map((each) => [each.incarnation, each.pod || each.endpoint]));
  const heads = ["prefill", "decode", "state", "over", "GB/s", "waiting", "under way", "done", "failed"];
  const head = html("tr", {}, ...heads.map((each) => html("th", {}, each)));
  const rows = fleet.handoff_links.slice(0, MOST_LINKS).map((link) => {
    const cells = [
      names.get(link.prefill) ?? link.prefill.slice(0, 8),
      names.get(link.decode) ?? link.decode.slice(0, 8),
      link.reason ? `${link.state}: ${link.reason}` : link.state,
      link.transport ?? "–",
      link.gb_per_s ? number(link.gb_per_s, 2) : "–",
      bytes(link.waiting_bytes),
      number(link.underway),
      number(link.handoffs),
      number(link.failed),
    ];
    return html("tr", { class: link.state }, ...cells.map((each) => html("td", {}, each)));
  });
  byId("links").replaceChildren(html("thead", {}, head), html("tbody", {}, ...rows));
  byId("links-box").hidden = rows.length === 0;
}
