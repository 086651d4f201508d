// A chat with the model, streamed; each answer links to its timeline.

import { ask, askJson } from "./ask.js";
import { showCall } from "./calls.js";
import { byId, html, ms, number } from "./draw.js";

const MOST_TURNS = 64;
const ANSWER_MS = 600000;

let history = [];
let stopping = null;

export function startChat(onError) {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopping) stopping.abort();
    else say(byId("words").value.trim()).catch(onError);
  });
  byId("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!stopping) say(byId("words").value.trim()).catch(onError);
    }
  });
  byId("forget").addEventListener("click", () => {
    history = [];
    byId("messages").replaceChildren();
  });
}

async function say(words) {
  if (!words) return;
  byId("words").value = "";
  history = [...history, { role: "user", content: words }].slice(-MOST_TURNS);
  show("user", words);
  const shown = show("assistant", "");
  const note = html("p", { class: "note" });
  shown.after(note);
  stopping = new AbortController();
  byId("send").textContent = "Stop";
  try {
    const text = await stream(shown, note);
    history = [...history, { role: "assistant", content: text }].slice(-MOST_TURNS);
  } catch (error) {
    if (error.name !== "AbortError") {
      note.textContent = error.message;
      note.className = "error";
      throw error;
    }
    note.textContent = "stopped";
  } finally {
    stopping = null;
    byId("send").textContent = "Send";
  }
}

async function stream(shown, note) {
  const began = performance.now();
  const signal = AbortSignal.any([stopping.signal, AbortSignal.timeout(ANSWER_MS)]);
  const models = await askJson("v1/models");
  const body = {
    model: models.data[0].id,
    messages: history,
    max_tokens: Number(byId("max-tokens").value) || 128,
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const answer = await ask("v1/chat/completions", { body, signal });
  let [text, first, usage] = ["", null, null];
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const delta = event.choices?.[0]?.delta;
    const words = `${delta?.reasoning_content ?? delta?.reasoning ?? ""}${delta?.content ?? ""}`;
    if (!words) continue;
    first ??= performance.now();
    text += words;
    shown.textContent = text;
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const count = usage?.completion_tokens ?? 0;
  const rate = count > 1 && seconds > 0 ? `, ${number((count - 1) / seconds, 1)} tokens/s` : "";
  const button = html("button", { type: "button", class: "plain" }, "timeline");
  const id = answer.headers.get("x-request-id");
  button.addEventListener("click", () => showCall(id));
  note.replaceChildren(`first token after ${ms((first ?? began) - began)}, ${count} tokens${rate} · `, button);
  return text;
}

/** The JSON of each event of a stream, until [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function show(role, words) {
  const message = html("div", { class: `message ${role}` }, words);
  byId("messages").append(message);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  return message;
}
