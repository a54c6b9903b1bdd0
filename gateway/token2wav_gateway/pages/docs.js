// Lists the requests of openapi.json with their fields.
const schema = await (await fetch("openapi.json")).json();

const resolved = (part) => (part?.$ref ? part.$ref.split("/").slice(1).reduce((at, name) => at[name], schema) : part);
const type = (part) => {
  const { anyOf, enum: values, items, type: kind, title } = resolved(part);
  if (anyOf) return anyOf.map(type).join(" or ");
  if (values) return values.map((value) => JSON.stringify(value)).join(" or ");
  return items ? `list of ${type(items)}` : (kind ?? title ?? "any");
};

function element(name, text, parent = document.getElementById("requests")) {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = text;
  return made;
}

for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [method, { description, requestBody, parameters = [] }] of Object.entries(methods)) {
    element("h2", `${method.toUpperCase()} ${path}`);
    element("p", description ?? "");
    for (const [media, content] of Object.entries(requestBody?.content ?? {})) {
      const body = resolved(content.schema);
      element("p", media);
      const table = element("table", "");
      for (const [name, part] of Object.entries(body.properties ?? {})) {
        const row = element("tr", "", table);
        element("th", name, row);
        element("td", type(part), row);
        element("td", body.required?.includes(name) ? "required" : `default ${JSON.stringify(part.default ?? null)}`, row);
      }
      element("pre", body.description ?? "");
    }
    for (const { name, schema: part } of parameters) element("p", `${name}: ${type(part)}`);
  }
}
