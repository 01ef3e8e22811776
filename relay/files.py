"""What is known of each file; its bytes lie elsewhere. A file that has no entry here is not there."""

import json
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

_READ_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class File:
    """`created` and `expires` in seconds since the epoch. `owner` is the name of the caller who sent it."""

    file_id: str
    owner: str
    name: str
    purpose: str
    size_bytes: int
    created: int
    expires: int | None = None

    @classmethod
    def new(
        cls, file_id: str, owner: str, name: str, purpose: str, size_bytes: int, expires_s: int | None
    ) -> "File":
        """Made now, and kept for `expires_s` (None: until it is deleted)."""
        now = int(time.time())
        return cls(
            file_id, owner, name, purpose, size_bytes, now, None if expires_s is None else now + expires_s
        )

    @property
    def stored_as(self) -> str:
        """The name of its object in the storage."""
        return object_name(self.file_id)


def object_name(file_id: str) -> str:
    return f"files/{file_id}"


def new_file_id() -> str:
    """One that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


class Files:
    """The files of one model's deployment. Every call may run twice without harm."""

    def __init__(self, redis: Redis, root: str) -> None:
        self._redis = redis
        self._root = root

    def begin(self, file_id: str) -> None:
        """Its object is about to be written. Who dies before `add` leaves one that nobody else knows of."""
        self._redis.zadd(self._unfinished(), {file_id: time.time()})

    def unfinished(self, before: float) -> list[str]:
        """Those begun before then and not added, or removed before then: their objects may be there."""
        ids: Any = self._redis.zrangebyscore(self._unfinished(), "-inf", before)
        return [each.decode() for each in ids]

    def forget(self, file_id: str) -> None:
        """There is no object of this unfinished or removed file any more."""
        self._redis.zrem(self._unfinished(), file_id)

    def add(self, file: File) -> None:
        """From here on the file exists."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(self._key(file.file_id), json.dumps(asdict(file)))
        pipeline.zadd(self._index(file.owner), {file.file_id: file.created})
        pipeline.zrem(self._unfinished(), file.file_id)
        if file.expires is not None:
            pipeline.zadd(self._expiring(), {file.file_id: file.expires})
        pipeline.execute()

    def find(self, file_id: str) -> File | None:
        return _file(self._redis.get(self._key(file_id)))

    def remove(self, file: File) -> bool:
        """From here on there is no such file; its object is still to be deleted. False when somebody else
        removed it before."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(self._key(file.file_id))
        pipeline.zadd(self._unfinished(), {file.file_id: time.time()})
        pipeline.zrem(self._index(file.owner), file.file_id)
        pipeline.zrem(self._expiring(), file.file_id)
        return bool(pipeline.execute()[0])

    def of(
        self, owner: str, after: str | None, count: int, purpose: str | None = None, newest_first: bool = True
    ) -> list[File] | None:
        """At most `count`, of that purpose if one is named, behind the file `after`. None: there is no such
        one."""
        index, files = self._index(owner), list[File]()
        place = 0
        if after is not None:
            rank: Any = self._redis.zrevrank if newest_first else self._redis.zrank
            before = rank(index, after)
            if before is None:
                return None
            place = before + 1
        step = _READ_AT_ONCE if purpose else min(count, _READ_AT_ONCE)
        while len(files) < count:
            ids: Any = self._redis.zrange(index, place, place + step - 1, desc=newest_first)
            if not ids:
                break
            place += len(ids)
            found: Any = self._redis.mget([self._key(each.decode()) for each in ids])
            files += [file for file in map(_file, found) if file and purpose in (None, file.purpose)]
        return files[:count]

    def expired(self, now: float) -> list[File]:
        ids: Any = self._redis.zrangebyscore(self._expiring(), "-inf", now)
        found = (self.find(each.decode()) for each in ids)
        return [file for file in found if file]

    def _key(self, file_id: str) -> str:
        return f"{self._root}:file:{file_id}"

    def _index(self, owner: str) -> str:
        return f"{self._root}:files:{owner}"

    def _unfinished(self) -> str:
        return f"{self._root}:unfinished_files"

    def _expiring(self) -> str:
        return f"{self._root}:expiring_files"


def _file(text: Any) -> File | None:
    return File(**json.loads(text)) if text else None
