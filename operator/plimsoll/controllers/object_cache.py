"""Cache of the watched objects, with the newest version of each.

The API server answers a write with the resulting object, which is put into the cache at once. The operator thus reads
its own writes. An older version that arrives later through a watch is ignored. So is an answer that arrives after the
object's deletion: the cache remembers the UIDs and versions of the latest deleted objects.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from plimsoll.adapters.engine_of_pod import is_of_earlier_service
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import DEFAULT_GPU_RESOURCE, InferenceService, parse
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import NameClaim, read_claims

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name
SLICE_SIZE = 50  # objects of a list that are put at once
MAX_DELETED = 10_000  # UIDs that are remembered; an answer comes within seconds of its request


def key_of(obj: Object) -> Key:
    meta = obj["metadata"]
    return meta.get("namespace", ""), meta["name"]


def owning_service(obj: Object) -> Key | None:
    """The service that an object belongs to, by its label; None if it has none."""
    meta = obj["metadata"]
    if obj.get("kind") == labels.KIND:
        return key_of(obj)
    name = meta.get("labels", {}).get(labels.SERVICE)
    return (meta.get("namespace", ""), name) if name else None


def role_of(obj: Object) -> str:
    """The tier that an object belongs to, by its label; "" if it has none."""
    return str(obj["metadata"].get("labels", {}).get(labels.ROLE, ""))


def worker_role_of(obj: Object) -> str:
    """The tier of whose engines a pod is a part, without being their leader; "" for any other pod."""
    return str(obj["metadata"].get("labels", {}).get(labels.WORKER_OF, ""))


def resource_version(obj: Object) -> int:
    """The object's resourceVersion; 0 if it is missing or not a number."""
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdecimal() else 0


class ObjectCache:
    """Objects by kind. `on_change` is called with the owning service of each changed object."""

    def __init__(
        self, on_change: Callable[[Key], None] = lambda key: None, gpu_resource: str = DEFAULT_GPU_RESOURCE
    ) -> None:
        """gpu_resource: what the installation's engines request if a tier has no gpuResource."""
        self._objects: dict[str, dict[Key, Object]] = {}
        self._children: dict[tuple[str, Key], dict[Key, None]] = {}
        # By uid: the object that was parsed, and the result.
        self._parsed: dict[str, tuple[Object, InferenceService | InvalidSpec]] = {}
        self._newest: dict[tuple[str, str], Object] = {}  # by kind and tier, over all services
        self._claims: dict[Key, tuple[NameClaim, ...]] = {}  # by service
        self._claims_by_name: dict[str, dict[str, NameClaim]] = {}  # by each of its names, then its qualified name
        self._on_change = on_change
        self._gpu_resource = gpu_resource
        self._services_in: Counter[str] = Counter()  # by namespace
        self._deleted: dict[str, int] = {}  # resourceVersion of the deletion by UID, the earliest first

    def put(self, obj: Object, *, notify: bool = True) -> None:
        """Put an object. A version that is older than the cached one, or equal to it, changes nothing.

        So does one of an earlier object of the same name: all objects of a kind share their versions. A deleted object
        stays away, unless a later version shows that only the labels which a watch selects had changed.

        notify: whether to call `on_change`.
        """
        kind, key = obj["kind"], key_of(obj)
        objects = self._objects.setdefault(kind, {})
        if self._is_outdated(objects.get(key), obj):
            return
        if key in objects and not _is_same_object(objects[key], obj):
            self._forget(objects[key])
        if key in objects and owning_service(objects[key]) != owning_service(obj):
            self._unlink(kind, key, objects[key])
        shared = with_shared_parts(obj, self._alike(kind, key, obj))
        if objects.get(key) is shared:
            return  # the watch brings what the answer to a write has brought before
        if key in objects:
            self._drop_newest(kind, objects[key])
        elif kind == labels.KIND:
            self._services_in[key[0]] += 1
        objects[key] = self._newest[kind, role_of(obj)] = shared
        if kind == labels.KIND:
            self._index_claims(key, read_claims(shared))
        owner = owning_service(obj)
        if owner is None:
            return
        self._children.setdefault((kind, owner), {})[key] = None
        if notify:
            self._on_change(owner)

    def _is_outdated(self, cached: Object | None, obj: Object) -> bool:
        """Whether the cache has seen a later version of the name, or the deletion of the object."""
        version = resource_version(obj)
        is_older = cached is not None and resource_version(cached) > version
        return is_older or version <= self._deleted.get(obj["metadata"].get("uid"), -1)

    def delete(self, obj: Object) -> None:
        """Remove an object as a watch says. An answer that arrives later does not put it back.

        The watch says so too of an object whose labels it does not select any more. Such an object may come back, with
        a later version.
        """
        uid = obj["metadata"].get("uid")
        if uid is not None:
            self._deleted.pop(uid, None)
            self._deleted[uid] = resource_version(obj)
            if len(self._deleted) > MAX_DELETED:
                del self._deleted[next(iter(self._deleted))]
        self.remove(obj)

    def remove(self, obj: Object) -> None:
        """Remove an object that is not of interest any more. It may be put again."""
        kind, key = obj["kind"], key_of(obj)
        cached = self._objects.get(kind, {}).get(key)
        if cached is None or not _is_same_object(cached, obj):
            return
        del self._objects[kind][key]
        if kind == labels.KIND:
            self._services_in -= Counter((key[0],))  # drops a namespace without services
        self._drop_newest(kind, cached)
        self._forget(cached)
        self._unlink(kind, key, cached)

    def replace(self, kind: str, objects: tuple[Object, ...], namespace: str | None = None) -> None:
        """Replace all objects of a kind, in one namespace or in all, by the result of a list call."""
        self._retain(kind, objects, namespace)
        for obj in objects:
            self.put(obj)

    async def replace_in_slices(self, kind: str, objects: tuple[Object, ...], namespace: str | None = None) -> None:
        """As `replace`, but let other tasks of the event loop run after each slice of the objects."""
        self._retain(kind, objects, namespace)
        for number, obj in enumerate(objects, 1):
            self.put(obj)
            if number % SLICE_SIZE == 0:
                await asyncio.sleep(0)

    def _retain(self, kind: str, objects: Iterable[Object], namespace: str | None) -> None:
        """Remove the objects of a kind that are not among those given."""
        present = {key_of(obj) for obj in objects}
        for key, obj in list(self._objects.get(kind, {}).items()):
            if key not in present and namespace in (None, key[0]):
                self.remove(obj)

    @property
    def service_namespaces(self) -> Iterable[str]:
        """The namespaces that have services."""
        return self._services_in.keys()

    def get(self, kind: str, key: Key) -> Object | None:
        return self._objects.get(kind, {}).get(key)

    def parsed(self, service_object: Object) -> InferenceService | InvalidSpec:
        """The parsed InferenceService, or the error in its spec. Each version of an object is parsed once.

        Of a version that is not in the cache, such as that of a deleted service, nothing is kept.
        """
        uid = service_object["metadata"]["uid"]
        entry = self._parsed.get(uid)
        if entry is None or entry[0] is not service_object:
            entry = service_object, _parse(service_object, self._gpu_resource)
            if self.get(labels.KIND, key_of(service_object)) is service_object:
                self._parsed[uid] = entry
        return entry[1]

    def claims_of(self, names: Iterable[str]) -> list[NameClaim]:
        """The claims that have one of these names, of all services that are not being deleted."""
        found: dict[str, NameClaim] = {}
        for name in names:
            found |= self._claims_by_name.get(name, {})
        return list(found.values())

    def all(self, kind: str) -> Iterator[Object]:
        return iter(list(self._objects.get(kind, {}).values()))

    def children(self, kind: str, service: Key) -> list[Object]:
        """The objects of a kind that belong to a service, in no particular order."""
        objects = self._objects.get(kind, {})
        return [objects[key] for key in self._children.get((kind, service), {})]

    def pods(self, service: Key) -> list[Object]:
        """The engine pods of a service: those of its tiers, or of its targets."""
        return self.tier_pods(service) + self.children(labels.ADOPTED_POD_KIND, service)

    def tier_pods(self, service: Key) -> list[Object]:
        """The pods of a service's tiers, without those that an earlier service of its name has left."""
        return [pod for pod in self.children("Pod", service) if not self.is_of_earlier_service(pod)]

    def is_of_earlier_service(self, pod: Object) -> bool:
        """Whether the service that the pod's label names is a successor of the pod's own."""
        owner = owning_service(pod)
        service_object = None if owner is None else self.get(labels.KIND, owner)
        return service_object is not None and is_of_earlier_service(pod, service_object)

    def all_pods(self) -> Iterator[Object]:
        """The engine pods of all services. A reader of very many may let other work run meanwhile."""
        own, adopted = self.all("Pod"), self.all(labels.ADOPTED_POD_KIND)
        return chain((pod for pod in own if not self.is_of_earlier_service(pod)), adopted)

    def replace_children(self, kind: str, service: Key, objects: Iterable[Object]) -> None:
        """Replace the objects of a kind that belong to a service. An unchanged object is left alone."""
        present = {key_of(obj): obj for obj in objects}
        for cached in self.children(kind, service):
            obj = present.get(key_of(cached))
            if obj is None or not _is_same_object(cached, obj):
                self.remove(cached)
            elif resource_version(cached) == resource_version(obj) and cached.get(labels.ADOPTED) == obj.get(
                labels.ADOPTED
            ):
                del present[key_of(obj)]
        for obj in present.values():
            self.put(obj)

    def _alike(self, kind: str, key: Key, obj: Object) -> Object | None:
        """The object that an object has most in common with: its earlier version, else one of the same tier.

        The first of its tier has most in common with the same tier of another service.
        """
        objects, owner = self._objects[kind], owning_service(obj)
        if key in objects or owner is None:
            return objects.get(key)
        siblings = (objects[sibling] for sibling in self._children.get((kind, owner), {}))
        newest = self._newest.get((kind, role_of(obj)))
        return next((one for one in siblings if role_of(one) == role_of(obj)), newest)

    def _drop_newest(self, kind: str, obj: Object) -> None:
        """Keep an object that leaves the cache from being the newest of its tier, so that nothing refers to it."""
        place = kind, role_of(obj)
        if self._newest.get(place) is obj:
            del self._newest[place]

    def _forget(self, obj: Object) -> None:
        """Drop what was derived from an object."""
        self._parsed.pop(obj["metadata"].get("uid"), None)
        if obj["kind"] == labels.KIND:
            self._index_claims(key_of(obj), ())

    def _index_claims(self, service: Key, claims: tuple[NameClaim, ...]) -> None:
        """Replace the claims of a service."""
        for claim in self._claims.pop(service, ()):
            for name in claim.names:
                of_name = self._claims_by_name[name]
                del of_name[claim.qualified_name]
                if not of_name:
                    del self._claims_by_name[name]
        if claims:
            self._claims[service] = claims
        for claim in claims:
            for name in claim.names:
                self._claims_by_name.setdefault(name, {})[claim.qualified_name] = claim

    def _unlink(self, kind: str, key: Key, obj: Object) -> None:
        owner = owning_service(obj)
        if owner:
            siblings = self._children.get((kind, owner), {})
            siblings.pop(key, None)
            if not siblings:
                self._children.pop((kind, owner), None)
            self._on_change(owner)


def _parse(service_object: Object, gpu_resource: str) -> InferenceService | InvalidSpec:
    try:
        return parse(service_object, gpu_resource)
    except InvalidSpec as error:
        return error


def _is_same_object(a: Object, b: Object) -> bool:
    """True for two versions of one object, False for an object and its re-created successor of the same name."""
    return bool(a["metadata"].get("uid") == b["metadata"].get("uid"))
