-- The tables of a database of version 1, as the first gateways made them.
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, created INTEGER NOT NULL,
    max_sandboxes INTEGER, max_vcpus INTEGER, max_memory INTEGER
) STRICT;
CREATE TABLE keys (
    hash BLOB PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL,
    created INTEGER NOT NULL, last_used INTEGER, revoked INTEGER
) STRICT;
CREATE TABLE claims (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants(name), sandbox TEXT,
    sandboxes INTEGER NOT NULL, vcpus INTEGER NOT NULL, memory INTEGER NOT NULL, expires INTEGER NOT NULL
) STRICT;
CREATE TABLE aliases (
    tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL, tag TEXT NOT NULL, target TEXT NOT NULL,
    assigned INTEGER NOT NULL, PRIMARY KEY (tenant, name, tag)
) STRICT;
CREATE INDEX aliases_of ON aliases (tenant, target);
CREATE TABLE audit (
    row INTEGER PRIMARY KEY AUTOINCREMENT, time_ns INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    action TEXT NOT NULL, object TEXT NOT NULL, outcome INTEGER NOT NULL
) STRICT;
CREATE INDEX audit_of ON audit (tenant, row);
CREATE INDEX audit_by_time ON audit (time_ns);
CREATE TABLE templates (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL, created_ns INTEGER NOT NULL,
    UNIQUE (tenant, name)
) STRICT;
CREATE TABLE builds (
    id TEXT PRIMARY KEY, template TEXT NOT NULL REFERENCES templates(id) ON DELETE CASCADE, tenant TEXT NOT NULL,
    state TEXT NOT NULL, created_ns INTEGER NOT NULL, finished_ns INTEGER, cpus INTEGER, memory_mib INTEGER, disk_mib INTEGER,
    wanted TEXT NOT NULL, kept INTEGER NOT NULL, settings TEXT NOT NULL, failure TEXT, log TEXT
) STRICT;
CREATE INDEX builds_of ON builds (template, created_ns);
CREATE INDEX builds_by_state ON builds (state);
CREATE TABLE tags (
    template TEXT NOT NULL REFERENCES templates(id) ON DELETE CASCADE, tag TEXT NOT NULL,
    build TEXT NOT NULL REFERENCES builds(id) ON DELETE CASCADE, assigned_ns INTEGER NOT NULL, PRIMARY KEY (template, tag)
) STRICT;
CREATE INDEX tags_of ON tags (build);
CREATE TABLE files (
    tenant TEXT NOT NULL REFERENCES tenants(name), hash TEXT NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (tenant, hash)
) STRICT;
