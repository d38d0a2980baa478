"""The tables of a record, as numbered migrations, and how a file is told to be one.

``application_id`` says that a SQLite file is a record, ``user_version`` how
many of the migrations it has had. A migration is never changed once it was
released: a change of the schema is a new one at the end.
"""

from __future__ import annotations

import sqlite3

from rlm_kernel.record.fault import Fault
from rlm_kernel.record.files import transaction

__all__ = ["APPLICATION_ID", "MIGRATIONS", "VERSION", "check", "migrate"]

APPLICATION_ID = 0x524C4D6B
"""``RLMk``, at offset 68 of the file."""

_FIRST = (
    # Indexes cost most of what an append costs. These three serve: the events of one run; the
    # turns of a run without wading through its sub-calls; the end that belongs to a start.
    """
    CREATE TABLE event (
        seq     INTEGER PRIMARY KEY,  -- from 1, without gaps
        run_id  TEXT NOT NULL,        -- empty for what happened outside any run
        at_s    REAL NOT NULL,        -- seconds since the epoch
        kind    TEXT NOT NULL,        -- name of the event's class
        turn    INTEGER,              -- NULL where the event belongs to no turn
        call_id TEXT,                 -- NULL where the event is no sub-call's
        tokens  INTEGER,              -- input and output tokens; NULL where the event has none
        body    TEXT NOT NULL         -- the event as JSON; long texts are references to blob
    )
    """,
    "CREATE INDEX event_run ON event (run_id)",
    "CREATE INDEX event_turn ON event (run_id, turn, kind) WHERE call_id IS NULL",
    "CREATE INDEX event_call ON event (call_id) WHERE call_id IS NOT NULL",
    """
    CREATE TABLE blob (
        sha256 TEXT PRIMARY KEY,      -- of the bytes before compression, as hex
        bytes  INTEGER NOT NULL,      -- before compression
        zstd   BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE prompt (
        id      INTEGER PRIMARY KEY,
        sha256  TEXT NOT NULL UNIQUE, -- of all chunks, joined, before compression
        kind    TEXT NOT NULL,        -- str: chunks are UTF-8; list, dict: chunks are JSON
        chars   INTEGER NOT NULL,     -- characters of the text, or of all items
        items   INTEGER NOT NULL,     -- 1 for a str
        bytes   INTEGER NOT NULL,     -- of all chunks before compression
        chunks  INTEGER NOT NULL,
        source  TEXT NOT NULL,        -- such as a file name
        preview TEXT NOT NULL         -- first characters
    )
    """,
    """
    CREATE TABLE prompt_chunk (
        prompt_id  INTEGER NOT NULL,  -- of a prompt, or of one that is still being written
        n          INTEGER NOT NULL,  -- from 0; each is 1 MiB before compression, the last less
        start_char INTEGER NOT NULL,  -- characters in the chunks before it
        bytes      INTEGER NOT NULL,  -- before compression
        zstd       BLOB NOT NULL,
        UNIQUE (prompt_id, n)
    )
    """,
    """
    CREATE VIEW runs AS
    SELECT
        s.run_id AS run,
        json_extract(s.body, '$.parent_run_id') AS parent,
        json_extract(s.body, '$.query') AS query,
        coalesce(json_extract(e.body, '$.state'), (
            SELECT CASE kind
                WHEN 'TurnProposed' THEN 'proposed' WHEN 'TurnDecided' THEN 'proposed'
                WHEN 'RunPaused' THEN 'proposed' WHEN 'RunResumed' THEN 'proposed'
                WHEN 'TurnExecuting' THEN 'executing' WHEN 'WorkerLost' THEN 'executing'
                WHEN 'TurnExecuted' THEN 'observing' WHEN 'TurnObserved' THEN 'observing'
                WHEN 'AnswerRejected' THEN 'observing' WHEN 'RunStarted' THEN 'idle'
                ELSE 'proposing' END
            FROM event
            WHERE run_id = s.run_id AND call_id IS NULL ORDER BY seq DESC LIMIT 1
        )) AS state,
        strftime('%Y-%m-%dT%H:%M:%fZ', s.at_s, 'unixepoch') AS started_utc,
        strftime('%Y-%m-%dT%H:%M:%fZ', e.at_s, 'unixepoch') AS ended_utc,
        e.at_s - s.at_s AS seconds,
        coalesce(json_extract(e.body, '$.turns'), (
            SELECT max(turn) FROM event WHERE run_id = s.run_id AND call_id IS NULL
        ), 0) AS turns,
        coalesce(e.tokens, (
            SELECT sum(tokens) FROM event WHERE run_id = s.run_id
        ), 0) AS tokens,
        coalesce(json_extract(e.body, '$.subcalls'), (
            SELECT count(*) FROM event WHERE run_id = s.run_id AND kind = 'SubcallStarted'
        )) AS subcalls,
        json_extract(e.body, '$.response') AS response,
        s.seq AS seq,
        s.at_s AS started_s,
        e.at_s AS ended_s
    FROM event AS s
    LEFT JOIN event AS e ON e.seq = (
        SELECT min(seq) FROM event
        WHERE run_id = s.run_id AND turn IS NULL AND kind = 'RunEnded' AND call_id IS NULL
    )
    WHERE s.kind = 'RunStarted' AND s.call_id IS NULL
    """,
    # Of several proposals of a turn the last one counts: it is the one that was decided on.
    """
    CREATE VIEW trajectory AS
    SELECT run, turn,
        CASE
            WHEN observation IS NULL THEN doing
            WHEN ok IS NULL THEN 'skipped'
            WHEN ok THEN 'done'
            ELSE 'failed'
        END AS state,
        source, observation, seconds, tokens
    FROM (
        SELECT
            t.run_id AS run,
            t.turn AS turn,
            (
                SELECT CASE kind
                    WHEN 'TurnProposed' THEN 'proposed' WHEN 'TurnDecided' THEN 'proposed'
                    WHEN 'RunPaused' THEN 'proposed' WHEN 'RunResumed' THEN 'proposed'
                    WHEN 'TurnExecuting' THEN 'executing' WHEN 'TurnExecuted' THEN 'observing'
                    WHEN 'AnswerRejected' THEN 'observing' ELSE 'proposing' END
                FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
                ORDER BY seq DESC LIMIT 1
            ) AS doing,
            (
                SELECT json_extract(body, '$.source') FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
                    AND kind IN ('TurnProposed', 'TurnExecuting')
                ORDER BY seq DESC LIMIT 1
            ) AS source,
            (
                SELECT json_extract(body, '$.observation') FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
                    AND kind = 'TurnObserved'
                ORDER BY seq DESC LIMIT 1
            ) AS observation,
            (
                SELECT json_extract(body, '$.result.ok') FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
                    AND kind = 'TurnExecuted'
                ORDER BY seq DESC LIMIT 1
            ) AS ok,
            (
                SELECT json_extract(body, '$.result.seconds') FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
                    AND kind = 'TurnExecuted'
                ORDER BY seq DESC LIMIT 1
            ) AS seconds,
            (
                SELECT coalesce(sum(tokens), 0) FROM event
                WHERE run_id = t.run_id AND turn = t.turn AND call_id IS NULL
            ) AS tokens,
            min(t.seq) AS seq
        FROM event AS t
        WHERE t.kind = 'TurnStarted' AND t.call_id IS NULL
        GROUP BY t.run_id, t.turn
    )
    ORDER BY seq
    """,
    """
    CREATE VIEW subcalls AS
    SELECT
        s.run_id AS run,
        s.turn AS turn,
        s.call_id AS call,
        json_extract(s.body, '$.kind') AS kind,
        json_extract(s.body, '$.model') AS model,
        CASE json_extract(e.body, '$.ok')
            WHEN 1 THEN 'done' WHEN 0 THEN 'failed' ELSE 'running'
        END AS state,
        json_extract(s.body, '$.prompt') AS prompt,
        json_extract(e.body, '$.response') AS response,
        json_extract(e.body, '$.error') AS error,
        e.at_s - s.at_s AS seconds,
        e.tokens AS tokens,
        json_extract(e.body, '$.attempts') AS attempts,
        json_extract(s.body, '$.batch_id') AS batch,
        json_extract(s.body, '$.index') AS place,
        json_extract(e.body, '$.child_run_id') AS child_run
    FROM event AS s
    LEFT JOIN event AS e
        ON e.call_id = s.call_id AND e.run_id = s.run_id AND e.kind = 'SubcallEnded'
    WHERE s.kind = 'SubcallStarted' AND s.call_id IS NOT NULL
    ORDER BY s.seq
    """,
)

_SECOND = (
    # What calls asked, so that a reply is found again without reading all events. In the order of
    # the events: an index by key, which is in no order, costs more than all else of a call.
    """
    CREATE TABLE asked (
        seq INTEGER PRIMARY KEY,      -- of a SubcallStarted
        key BLOB NOT NULL             -- its key, 16 bytes
    )
    """,
    # An event of a sub-call leaves out what has its default.
    "DROP VIEW subcalls",
    """
    CREATE VIEW subcalls AS
    SELECT
        s.run_id AS run,
        s.turn AS turn,
        s.call_id AS call,
        json_extract(s.body, '$.kind') AS kind,
        json_extract(s.body, '$.model') AS model,
        CASE json_extract(e.body, '$.ok')
            WHEN 1 THEN 'done' WHEN 0 THEN 'failed' ELSE 'running'
        END AS state,
        json_extract(s.body, '$.prompt') AS prompt,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.response'), '') END AS response,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.error'), '') END AS error,
        e.at_s - s.at_s AS seconds,
        e.tokens AS tokens,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.attempts'), 1) END AS attempts,
        coalesce(json_extract(s.body, '$.batch_id'), '') AS batch,
        coalesce(json_extract(s.body, '$.index'), 0) AS place,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.child_run_id'), '') END AS child_run,
        json_extract(s.body, '$.params.task') AS task,
        (
            SELECT CASE json_extract(body, '$.ok')
                WHEN 1 THEN 'ok' ELSE coalesce(json_extract(body, '$.reason'), '')
            END
            FROM event
            WHERE call_id = s.call_id AND run_id = s.run_id AND kind = 'SubcallJudged'
            ORDER BY seq DESC LIMIT 1
        ) AS verdict,
        coalesce(json_extract(s.body, '$.retry_of'), '') AS retry_of,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.cached'), 0) END AS cached,
        coalesce(json_extract(s.body, '$.queued_s'), 0.0) AS queued_s,
        json_extract(e.body, '$.first_token_s') AS first_token_s,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.server'), '') END AS server,
        CASE WHEN e.seq THEN coalesce(json_extract(e.body, '$.trouble'), '[]') END AS trouble
    FROM event AS s
    LEFT JOIN event AS e
        ON e.call_id = s.call_id AND e.run_id = s.run_id AND e.kind = 'SubcallEnded'
    WHERE s.kind = 'SubcallStarted' AND s.call_id IS NOT NULL
    ORDER BY s.seq
    """,
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _SECOND)
"""Statements of each migration; the first makes version 1 out of an empty file."""

VERSION = len(MIGRATIONS)


def check(connection: sqlite3.Connection) -> int:
    """The version of the record in *connection*; 0 for a file that is still empty.

    Raises
    ------
    Fault
        The file is something else, or a record that a newer rlm-kernel wrote. A file that is
        no database at all raises `sqlite3.DatabaseError`.
    """
    application_id, version, objects = (
        connection.execute(question).fetchone()[0]
        for question in (
            "PRAGMA application_id",
            "PRAGMA user_version",
            "SELECT count(*) FROM sqlite_master",
        )
    )
    if application_id == 0 and version == 0 and objects == 0:
        return 0
    if application_id != APPLICATION_ID:
        raise Fault("it is a database of something else; choose another file")
    if version > VERSION:
        raise Fault(
            f"it is of version {version} and this rlm-kernel reads up to {VERSION}; "
            "update rlm-kernel"
        )
    return int(version)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a record of *version* up to `VERSION`, each migration wholly or not at all."""
    for number in range(version + 1, VERSION + 1):
        with transaction(connection):
            for statement in MIGRATIONS[number - 1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
