// The last requests as bars, and one of them with all its parts.

import { askJson } from "./ask.js";
import { byId, html, ms, number } from "./draw.js";

const OWNERS = ["client", "router", "prefill", "decode"];
const MOST_PARTS = 200;
const SHORT = 0.003; // of the whole: parts below it are summed up

let chosen = null;

export function drawLegend() {
  byId("legend").replaceChildren(...OWNERS.map((each) => html("span", { class: `owner ${each}` }, each)));
}

export function drawCalls(calls) {
  const rows = calls.map((call) => {
    const row = html(
      "button",
      { type: "button", class: call.request_id === chosen ? "row chosen" : "row" },
      html("span", { class: "what" }, `${call.path.replace("/v1/", "")} ${call.request_id.slice(0, 8)}`),
      html("span", { class: statusLook(call) }, call.running ? "runs" : String(call.status ?? "–")),
      html("span", { class: "count" }, `${number(call.num_prompt_tokens)} → ${number(call.num_tokens)}`),
      html("span", { class: "time" }, ms(call.total_ms)),
      bar(call),
    );
    row.addEventListener("click", () => showCall(call.request_id));
    return row;
  });
  const none = html("p", { class: "note" }, "No request yet: ask something.");
  byId("calls").replaceChildren(...(rows.length ? rows : [none]));
}

function statusLook(call) {
  if (call.running) return "status runs";
  return call.status && call.status < 400 ? "status good" : "status bad";
}

function bar(call) {
  const whole = Math.max(call.total_ms, 1e-6);
  const pieces = call.parts.map(([owner, name, begin, length]) =>
    piece(owner, begin / whole, length / whole, `${owner}: ${name}, ${ms(length)}`),
  );
  if (call.first_token_ms !== null) {
    const mark = html("i", { class: "first", title: `first token after ${ms(call.first_token_ms)}` });
    mark.style.left = `${(100 * call.first_token_ms) / whole}%`;
    pieces.push(mark);
  }
  return html("span", { class: "bar" }, ...pieces);
}

function piece(owner, begin, length, title) {
  const made = html("i", { class: `owner ${owner}`, title });
  made.style.left = `${100 * begin}%`;
  made.style.width = `max(1px, ${100 * length}%)`;
  return made;
}

export async function showCall(id) {
  chosen = id;
  const place = byId("call");
  place.hidden = false;
  try {
    const call = await askJson(`debug/requests/${encodeURIComponent(id)}`);
    if (chosen === id) place.replaceChildren(...partsOf(call));
  } catch (error) {
    place.replaceChildren(html("p", { class: "error" }, String(error.message)));
  }
}

function partsOf(call) {
  const close = html("button", { type: "button", class: "close", title: "close" }, "×");
  close.addEventListener("click", () => {
    chosen = null;
    byId("call").hidden = true;
  });
  const whole = Math.max(call.total_ms, 1e-6);
  const long = call.parts.filter((part) => part.ms >= SHORT * whole).slice(0, MOST_PARTS);
  const rows = long.map((part) => {
    const amount = part.amount ? ` (${number(part.amount)})` : "";
    return html(
      "div",
      { class: "part" },
      html("span", { class: "what" }, `${part.owner}: ${part.name}${amount}`),
      html("span", { class: "time" }, ms(part.ms)),
      html("span", { class: "bar" }, piece(part.owner, part.begin_ms / whole, part.ms / whole, "")),
    );
  });
  const left = call.parts.length - long.length;
  const short = call.total_ms - long.reduce((sum, part) => sum + part.ms, 0);
  if (left) rows.push(html("p", { class: "note" }, `and ${left} short parts, ${ms(short)} together`));
  const first = call.first_token_ms === null ? "" : `, first token after ${ms(call.first_token_ms)}`;
  return [
    html("h3", {}, `${call.path} ${call.request_id} `, close),
    html("p", { class: "note" }, `${ms(call.total_ms)} in all${first}; ${call.num_prompt_tokens} tokens in, ${call.num_tokens} out`),
    ...rows,
    ...call.attempts.flatMap(attemptRows),
  ];
}

function attemptRows(attempt) {
  const head = html("h4", {}, `attempt ${attempt.number} (${attempt.kind}): ${attempt.rule}`);
  const failure = attempt.failure ? [html("p", { class: "error" }, attempt.failure)] : [];
  const candidates = attempt.candidates.map((each) => {
    const numbers = [`${number(each.cached_tokens)} cached`, `${number(each.requests)} requests`];
    const text = `${each.chosen ? "→ " : ""}${each.worker}: ${numbers.join(", ")}`;
    return html("p", { class: each.chosen ? "candidate chosen" : "candidate" }, text);
  });
  const moved = attempt.legs.flatMap((leg) => (leg.notes ?? []).filter((note) => note.gb_per_s));
  const links = moved.map((note) =>
    html("p", { class: "candidate" }, `${note.name}: ${number(note.amount)} bytes in ${ms(note.ms)}, ${number(note.gb_per_s, 3)} GB/s`),
  );
  return [head, ...failure, ...candidates, ...links];
}
