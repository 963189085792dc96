"""Documents of an engine: compressed caches for many questions; the least recently used ones are on disk."""

import collections
import dataclasses
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import ConversationState, KVCache, repack_through_host
from jaxkv.cache.saved import load_cache
from jaxkv.checkpoints.whole_files import write_file_atomically
from jaxkv.engine.slot_shape import SlotShape
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.serving.kept_tokens import KeptTokens

_ID = re.compile("doc-[0-9a-f]{16}")
_NOTICES = logging.getLogger("jaxkv")


class UnknownDocument(ValueError):
    """Error for a document id that the engine does not know: the document was removed, or is another engine's."""


class UnreadableDocument(ValueError):
    """Error for a document on disk that cannot be read: its folder is damaged or missing."""


@frozen_dataclass
class Document:
    """Handle of a document that an engine has compressed, for `submit`: id, tokens, entries, bytes; no cache.

    Attributes:
        id: id of the document in its engine.
        tokens: number of tokens of the document.
        rows: entries kept per kv head and layer, on average.
        nbytes: size of its cache on the device in bytes; the headroom for a question and an answer belongs to a slot.
        kept_nbytes: size of the kept entries (keys and values) in bytes.
        full_nbytes: size of the entries of all of its tokens in an uncompressed cache, in bytes.
        kept: its token ids, and which kv heads of which layers keep the entry of each token.
        turn: turn of the conversation after it.
        owner: name of the server's client that posted it; empty for none.
    """

    id: str
    tokens: int
    rows: float
    nbytes: int
    kept_nbytes: int
    full_nbytes: int
    kept: KeptTokens = dataclasses.field(repr=False, compare=False)
    turn: ConversationState
    owner: str = ""

    def is_visible_to(self, client: str) -> bool:
        """Return True if a client of the server may see the document: its owner, or a client without a name."""
        return client in ("", self.owner)


def _remove_folder(folder: Path, process: int) -> None:
    """Delete a folder with its contents, but not in a forked process: only in the process that created it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class DocumentCacheStore:
    """Compressed caches of an engine's documents: up to `most_bytes`, or one, on the device; least recent on disk.

    In a user's folder, every document is written when it is added. All engines of the same model, policy and slots
    find it there, including those that run now.
    """

    def __init__(
        self,
        params: LanguageModel,
        policy: Policy,
        *,
        shape: SlotShape,
        most_bytes: int,
        folder: Path | None,
    ):
        """Create a store of the documents in `folder`, caches unread; for None, in a new temporary folder.

        `shape` is the shape of the slots, which a document enters for each question.
        """
        self.most_bytes, self._shape = most_bytes, shape
        self._params, self._policy, self._lock = params, policy, threading.Lock()
        self._known: dict[str, Document] = {}
        # Ids of files in the folder that are not documents of this engine.
        self._others = set[str]()
        # In order of use, the most recent last.
        self._held: collections.OrderedDict[str, KVCache] = collections.OrderedDict()
        self._kept = folder is not None
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="jaxkv-documents-"))
            # Removed with this object, or when the process ends.
            self._remove = weakref.finalize(self, _remove_folder, folder, os.getpid())
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._refresh_known_documents()

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the documents' caches on the device, without those on disk."""
        with self._lock:
            return sum(self._known[name].nbytes for name in self._held)

    def get_documents(self) -> list[Document]:
        """Return the `Document` of every document, on the device or on disk, in order of their ids."""
        with self._lock:
            self._refresh_known_documents()
            return [self._known[name] for name in sorted(self._known)]

    def get_document(self, name: str) -> Document:
        """Return the `Document` with this id; `UnknownDocument`, a ValueError, if there is none."""
        with self._lock:
            if _ID.fullmatch(name):
                self._refresh_known_documents(name)
            if name not in self._known:
                told = "unknown document: it was removed, or belongs to another engine"
                raise UnknownDocument(f"document={name!r}: {told}")
            return self._known[name]

    def add_document(self, cache: KVCache, ids: Sequence[int], owner: str = "") -> Document:
        """Store a cache, less headroom, as a new document, also on disk if the folder is a user's; return a `Document`.

        Other documents may be moved to disk.
        """
        tight = repack_through_host(dataclasses.replace(cache, logits=None), cache.axes)
        made = Document(
            id=f"doc-{secrets.token_hex(8)}",
            tokens=int(np.asarray(cache.seen)[0]),
            rows=float(np.mean(cache.kept)),
            nbytes=tight.nbytes,
            kept_nbytes=cache.kept_nbytes // cache.batch,
            full_nbytes=cache.full_nbytes // cache.batch,
            kept=KeptTokens.from_cache(cache, ids),
            turn=cache.turn if isinstance(cache.turn, ConversationState) else cache.turn[0],
            owner=owner,
        )
        if self._kept:
            self._write_document(made, tight)
        with self._lock:
            self._known[made.id] = made
        try:
            self._keep_on_device(made.id, tight)
        except OSError:
            # The document does not fit if no other document can be moved to disk.
            self.remove_document(made.id)
            raise
        return made

    def get_document_cache(self, name: str) -> KVCache:
        """Return a copy of a document's cache in a slot's shape; keep the cache, from disk if needed, on the device.

        Raises ValueError if the id is unknown.
        """
        made = self.get_document(name)
        with self._lock:
            cache = self._held.get(name)
        if cache is None:
            try:
                cache = load_cache(self._folder / made.id, self._params, policy=self._policy)
            except ValueError as error:
                # Another thread or process may have removed the document and its folder.
                self.get_document(name)
                raise UnreadableDocument(
                    f"document={name!r}: cannot read its saved cache: {error}"
                ) from error
        self._keep_on_device(name, cache)
        return repack_through_host(cache, cache.axes, rows=self._shape.rows)

    def remove_document(self, name: str) -> None:
        """Remove a document from the device and the disk; `UnknownDocument`, a ValueError, if there is none."""
        self.get_document(name)
        with self._lock:
            self._known.pop(name, None)
            self._held.pop(name, None)
        self._delete_document_files(name)

    def close_document_store(self) -> None:
        """Close the store: drop all documents' caches on the device; delete the folder if temporary."""
        with self._lock:
            self._held.clear()
        if not self._kept:
            self._remove()

    def _keep_on_device(self, name: str, cache: KVCache) -> None:
        """Keep a cache on the device as last used; above `most_bytes`, move the least recent ones to disk."""
        with self._lock:
            if name in self._known:
                self._held[name] = cache
                self._held.move_to_end(name)
            held = [self._known[each] for each in self._held]
        over = sum(each.nbytes for each in held) - self.most_bytes
        # The most recent one is always kept on the device.
        for document in held[:-1]:
            if over <= 0:
                break
            waiting = self._held.get(document.id)
            # Written first: if that fails, nothing is lost.
            if waiting is not None and not self._get_description_path(document.id).exists():
                try:
                    self._write_document(document, waiting)
                except OSError:
                    # Another thread or process may have removed the document and its folder.
                    if document.id in self._known:
                        raise
            with self._lock:
                self._held.pop(document.id, None)
            over -= document.nbytes
            if document.id not in self._known:
                # The document was removed while it was written.
                self._delete_document_files(document.id)

    def _delete_document_files(self, name: str) -> None:
        """Delete a document's cache and description from disk, if there are any."""
        self._get_description_path(name).unlink(missing_ok=True)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _get_description_path(self, name: str) -> Path:
        """Return the path of a document's JSON description, whose existence marks its cache on disk as complete."""
        return self._folder / f"{name}.json"

    def _describe_model_and_policy(self) -> dict[str, Any]:
        """Return the model's fingerprint and the policy's repr as a dict, which documents on disk must match."""
        return {"model": str(self._params.fingerprint), "policy": repr(self._policy)}

    def _write_document(self, document: Document, cache: KVCache) -> None:
        """Write a document's cache to a folder, then its description as JSON."""
        cache.save(self._folder / document.id)
        described = dataclasses.asdict(document) | {
            "turn": document.turn.value,
            "kept": document.kept.to_json_values(),
            "made_for": self._describe_model_and_policy(),
        }
        write_file_atomically(
            self._get_description_path(document.id), json.dumps(described).encode()
        )

    def _refresh_known_documents(self, *names: str) -> None:
        """Register documents of these ids, or all, that other engines wrote to a user's folder; forget deleted ones."""
        if not self._kept:
            return
        for name in names or sorted(
            self._known.keys() | {each.stem for each in self._folder.glob("*.json")}
        ):
            there = self._get_description_path(name).exists()
            if not there:
                self._known.pop(name, None)
                self._held.pop(name, None)
            elif name not in self._known and name not in self._others:
                self._others.add(name)
                self._register_described_document(self._get_description_path(name))

    def _register_described_document(self, path: Path) -> None:
        """Register the document that a file describes; skip an invalid, too long or foreign one with a warning."""
        try:
            described = json.loads(path.read_text())
            for_whom = described.pop("made_for")
            read = {
                "turn": ConversationState(described["turn"]),
                "kept": KeptTokens.from_json_values(described["kept"]),
            }
            document = Document(**described | read)
        except (ValueError, TypeError, KeyError, OSError) as error:
            _NOTICES.warning("%s: skipped: not a valid description of a document: %s", path, error)
            return
        if for_whom != self._describe_model_and_policy() or document.id != path.stem:
            _NOTICES.warning("%s: skipped: it belongs to another model or policy", path)
        elif document.tokens > self._shape.prompt:
            said = "%s: skipped: its %d tokens exceed the maximum of a prompt"
            _NOTICES.warning(said, path, document.tokens)
        else:
            self._known[document.id] = document
            self._others.discard(document.id)
