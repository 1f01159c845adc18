// Asking the server. Every answer is JSON; a refusal carries a sentence that says what to do.

export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(given).toString();
  let response;
  try {
    response = await fetch(`api/${path}${search ? `?${search}` : ""}`, {signal: AbortSignal.timeout(60_000)});
  } catch {
    throw new Error("The server does not answer. Is `rayapp view` still running?");
  }
  if (response.status === 401 || response.status === 403) throw new Error(await response.text());
  const content = await response.json().catch(() => null);
  if (!response.ok || content === null) throw new Error(content?.error ?? `The server answered ${response.status}.`);
  return content;
}

export const askRun = (run, what, query) => ask(`runs/${run}/${what}`, query);
