// The page of the API: each operation of openapi.json, its fields, and a form that sends a request.

import { ask, askJson, useKey } from "./ask.js";
import { byId, html } from "./draw.js";

const DEEPEST = 4; // objects within objects that an example shows
const ANSWER_MS = 120000;

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  show();
});
show();

async function show() {
  byId("error").textContent = "";
  try {
    draw(await askJson("openapi.json"));
  } catch (error) {
    byId("error").textContent = error.message;
  }
}

function draw(document_) {
  byId("version").textContent = document_.info.version;
  const byTag = new Map();
  for (const [path, verbs] of Object.entries(document_.paths)) {
    for (const [verb, operation] of Object.entries(verbs)) {
      const tag = operation.tags?.[0] ?? "Other";
      if (!byTag.has(tag)) byTag.set(tag, []);
      byTag.get(tag).push(drawn(document_, path, verb, operation));
    }
  }
  const parts = [...byTag].map(([tag, items]) =>
    html("section", {}, html("h2", {}, tag), html("ul", { class: "docs" }, ...items)),
  );
  byId("operations").replaceChildren(...parts);
}

function drawn(document_, path, verb, operation) {
  const box = html("details", { class: "card" });
  const about = operation.summary ?? operation.description ?? "";
  box.append(
    html(
      "summary",
      {},
      html("span", { class: "verb" }, verb.toUpperCase()),
      html("span", { class: "path" }, path),
      html("span", { class: "about" }, about),
    ),
  );
  // Schemas are large: an operation is drawn when it is opened.
  box.addEventListener("toggle", () => fill(box, document_, path, verb, operation), { once: true });
  return html("li", {}, box);
}

function fill(box, document_, path, verb, operation) {
  if (operation.description && operation.summary) box.append(html("p", { class: "note" }, operation.description));
  const parameters = (operation.parameters ?? []).map((each) => resolved(document_, each));
  const content = resolved(document_, operation.requestBody ?? {}).content ?? {};
  const schema = resolved(document_, content["application/json"]?.schema ?? {});
  const rows = [
    ...parameters.map((each) => row(document_, each.name, each.schema ?? {}, each.required, each.in)),
    ...Object.entries(schema.properties ?? {}).map(([name, field]) =>
      row(document_, name, field, schema.required?.includes(name), "body"),
    ),
  ];
  if (rows.length) box.append(html("table", {}, ...rows));
  const statuses = Object.entries(operation.responses ?? {}).map(
    ([status, answer]) => `${status} ${resolved(document_, answer).description ?? ""}`,
  );
  box.append(html("p", { class: "note" }, `Answers: ${statuses.join("; ")}`));
  box.append(form(document_, path, verb, parameters, content["application/json"], schema));
}

function row(document_, name, given, required, where) {
  const field = resolved(document_, given);
  const notes = [where, required ? "required" : "", field.description ?? ""];
  return html(
    "tr",
    {},
    html("td", {}, name),
    html("td", {}, kind(document_, given, 0)),
    html("td", {}, notes.filter(Boolean).join("; ")),
  );
}

function kind(document_, given, depth) {
  const field = resolved(document_, given);
  if (field.enum) return field.enum.map(String).join(" | ");
  const several = field.anyOf ?? field.oneOf;
  if (several && depth < 2) return [...new Set(several.map((each) => kind(document_, each, depth + 1)))].join(" | ");
  if (field.type === "array" && depth < 2) return `list of ${kind(document_, field.items ?? {}, depth + 1)}`;
  return String(field.type ?? field.const ?? field.title ?? "any");
}

function form(document_, path, verb, parameters, content, schema) {
  const inputs = parameters
    .filter((each) => each.in === "path" || each.in === "query")
    .map((each) => [each, html("input", { "aria-label": each.name, placeholder: each.name, maxlength: "1000" })]);
  const example = content?.example ?? Object.values(content?.examples ?? {})[0]?.value ?? exampleOf(document_, schema, 0);
  const body = html("textarea", { spellcheck: "false", "aria-label": "body", maxlength: "1000000" });
  body.value = content ? JSON.stringify(example, null, 2) : "";
  const answer = html("pre", { hidden: "" });
  const send = html("button", { type: "submit" }, "Send");
  const box = html("form", {}, ...inputs.map(([, input]) => input));
  if (content) box.append(body);
  box.append(html("div", { class: "line" }, send), answer);
  box.addEventListener("submit", async (event) => {
    event.preventDefault();
    send.disabled = true;
    answer.hidden = false;
    answer.textContent = "…";
    try {
      const url = address(path, inputs);
      const signal = AbortSignal.timeout(ANSWER_MS);
      const given = verb === "get" ? undefined : content ? JSON.parse(body.value) : {};
      const response = await ask(url, { body: given, signal });
      answer.textContent = `${response.status}\n${pretty(await response.text())}`;
    } catch (error) {
      answer.textContent = error.message;
    } finally {
      send.disabled = false;
    }
  });
  return box;
}

function address(path, inputs) {
  const query = new URLSearchParams();
  let filled = path;
  for (const [parameter, input] of inputs) {
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(parameter.name, input.value);
  }
  const words = query.toString();
  return filled.slice(1) + (words ? `?${words}` : "");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function exampleOf(document_, given, depth) {
  const field = resolved(document_, given);
  if (field.example !== undefined) return field.example;
  if (field.examples?.length) return field.examples[0];
  if (field.default !== undefined && field.default !== null) return field.default;
  if (field.enum) return field.enum[0];
  if (field.const !== undefined) return field.const;
  const several = field.anyOf ?? field.oneOf;
  if (several) return depth < DEEPEST ? exampleOf(document_, several[0], depth + 1) : null;
  if (field.type === "object" || field.properties) {
    const wanted = (field.required ?? []).filter((name) => field.properties?.[name]);
    return Object.fromEntries(wanted.map((name) => [name, exampleOf(document_, field.properties[name], depth + 1)]));
  }
  if (field.type === "array") return depth < DEEPEST ? [exampleOf(document_, field.items ?? {}, depth + 1)] : [];
  return { string: "", integer: 0, number: 0, boolean: false }[field.type] ?? null;
}

function resolved(document_, given) {
  let found = given;
  for (let hops = 0; found?.$ref && hops < 8; hops += 1) {
    found = found.$ref.slice(2).split("/").reduce((at, key) => at?.[key.replace("~1", "/")], document_);
  }
  return found ?? {};
}
