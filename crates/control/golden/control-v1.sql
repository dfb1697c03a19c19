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
