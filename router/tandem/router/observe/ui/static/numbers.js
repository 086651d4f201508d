// The figures above and below the picture: rates, phases, the queue.

import { byId, html, ms, number } from "./draw.js";

const PHASES = {
  admission: "in the queue",
  no_worker: "no worker",
  sent: "sent",
  prefill: "prefill",
  handoff: "hand-off",
  decode: "decode",
  client: "client reads",
};

export function drawNumbers(fleet) {
  const rates = fleet.rates;
  const sum = (role, field) =>
    fleet.workers.filter((e) => !role || e.role === role).reduce((all, e) => all + (e[field] ?? 0), 0);
  const tiles = [
    ["requests / s", number(rates.requests_per_s, 1)],
    ["prompt tokens / s", number(sum("", "prompt_tokens_per_s"))],
    ["tokens / s", number(sum("", "generated_tokens_per_s"))],
    ["first token", ms(rates.ttft_ms)],
    ["between tokens", ms(rates.itl_ms)],
    ["prompts cached", percent(rates.cached_share)],
    ["failed / s", number(rates.failed_per_s, 1), rates.failed_per_s ? "bad" : ""],
  ];
  byId("rates").replaceChildren(
    ...tiles.map(([name, value, look]) =>
      html("div", { class: `tile ${look ?? ""}` }, html("b", {}, value), html("span", {}, name)),
    ),
  );
  byId("phases").replaceChildren(
    ...Object.entries(fleet.underway).map(([phase, count]) =>
      html("li", { class: count ? `some ${phase}` : "" }, html("b", {}, number(count)), PHASES[phase] ?? phase),
    ),
  );
  byId("queue").textContent = queueWords(fleet);
}

function percent(share) {
  return share === null || share === undefined ? "–" : `${number(100 * share)} %`;
}

function queueWords(fleet) {
  const queue = fleet.queue;
  const words = [];
  if (queue.waiting) words.push(`the oldest has waited ${number(queue.oldest_wait_s, 1)} s for its turn`);
  const refused = Object.entries(queue.rejected).map(([why, count]) => `${number(count)} by ${why}`);
  if (refused.length) words.push(`refused since the start: ${refused.join(", ")}`);
  const lost = Object.entries(fleet.links).filter(([, state]) => state !== "up");
  if (lost.length) words.push(`no worker answers at ${lost.map(([at]) => at).join(", ")}`);
  return words.join("; ");
}
