// The address is the whole state of the page: "#/groups?run=0&task=sort_numbers". A link to it shows the same.

export function route() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {page: path || "curves", query: Object.fromEntries(new URLSearchParams(search))};
}

export function link(page, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(given).toString();
  return `#/${page}${search ? `?${search}` : ""}`;
}

export function go(page, query, {replace = false} = {}) {
  const address = link(page, query);
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}
