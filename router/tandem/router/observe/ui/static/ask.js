// Asks the router, with the key that the user gave; what every part of the page stands on.

const DEADLINE_MS = 8000;
const KEPT = "tandem-api-key";

let key = sessionStorage.getItem(KEPT) ?? "";

/** The router refused the key, or wants one. */
export class Unauthorized extends Error {}

export function useKey(given) {
  key = given.trim();
  if (key) sessionStorage.setItem(KEPT, key);
  else sessionStorage.removeItem(KEPT);
}

export function hasKey() {
  return key !== "";
}

/** One request; a stream is read by the caller, under a signal of its own. */
export async function ask(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: signal ?? AbortSignal.timeout(DEADLINE_MS),
    cache: "no-store",
    credentials: "omit",
  });
  if (answer.status === 401) throw new Unauthorized("the router does not take this key");
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

export async function askJson(path) {
  return (await ask(path)).json();
}

async function reasonOf(answer) {
  try {
    const content = await answer.json();
    return `${answer.status}: ${content.error.message}`;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}
