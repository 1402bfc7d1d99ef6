// What modules return, and who chose how it is sharded.

function activationName({ path, method, output }) {
  return path + (method === "__call__" ? "" : `.${method}()`) + output;
}

function activationsSection({ mesh, activations: rows }) {
  const [id, title, noun] = ["activations", "Activations", "activation"];
  if (!rows.length) return section(id, title, note("No calls of modules are known."));
  const path = (row) => el("code.path", activationName(row));
  const columns = [
    { label: "Activation", value: activationName, cell: path },
    { label: "Module", value: (row) => row.module, cell: (row) => el("code", row.module) },
    { label: "Dtype", value: (row) => row.dtype, cell: (row) => el("code", row.dtype) },
    { label: "Shape and axes", value: axesKey, cell: (row) => shapeAndAxes(row, mesh) },
    { label: "Chosen by", value: (row) => row.chosen_by },
    { label: "Bytes/device", value: (row) => row.bytes_per_device, number: bytes },
    { label: "Bytes", value: (row) => row.bytes_total, number: bytes },
  ];
  const search = (row) => [activationName(row), row.module, row.chosen_by, axesKey(row)];
  const table = tableOf({ name: title, noun, columns, rows, search });
  const words = note("What modules return, in the order in which they do.");
  return section(id, title, words, table.node);
}
