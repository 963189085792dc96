for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", at = [...row.cells].indexOf(head);
  for (const cell of row.cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (line) => line.cells[at].dataset.value ?? line.cells[at].textContent;
  const order = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
  const lines = [...body.rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b)));
  for (const line of lines) body.append(line);
});
