//! Cases of state that is damaged: whatever has become of the database, its log or a record, the next daemon loses no sandbox, no
//! disk, no snapshot, and ends no VMM.
//!
//! One world goes through all kinds of damage, one after the other: each finds what the recovery from the last one has left.

#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes of files on a host of 64 bits, and small numbers"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rusqlite::Connection;

use crate::cases::kill;
use crate::daemons::wait_for_state;
use crate::snapshots::refused;
use crate::world::{World, done, is_alive, json, wait_for};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_damaged_state_loses_nothing", a_damaged_state_loses_nothing),
    ("what_has_no_record_is_set_aside", what_has_no_record_is_set_aside),
    (
        "a_vmm_without_any_record_is_left_alone",
        a_vmm_without_any_record_is_left_alone,
    ),
];

const LOOP: &str = "echo hello; while :; do sleep 0.02; done";

/// What is where in the state directory.
struct Files {
    state: PathBuf,
    /// The ids of the sandbox that runs, of the one that has ended, and of the one that was made last.
    on: String,
    over: String,
    late: String,
    /// Copies of the database: before the last sandbox was made, and before the second one ended.
    before_late: PathBuf,
    before_over: PathBuf,
    /// The record of the first sandbox at that time.
    old_record: Vec<u8>,
}

impl Files {
    fn database(&self) -> PathBuf {
        self.state.join("node.db")
    }

    fn log(&self) -> PathBuf {
        self.state.join("node.db-wal")
    }

    fn record(&self, id: &str) -> PathBuf {
        self.state.join("sandboxes").join(id).join("record.json")
    }

    /// The database with everything in one file.
    fn whole(&self) -> Connection {
        let database = Connection::open(self.database()).unwrap();
        let done = |row: &rusqlite::Row<'_>| row.get::<_, i64>(0);
        let busy = database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], done).unwrap();
        assert_eq!(busy, 0);
        database
    }

    fn sql(&self, text: &str) {
        self.whole().execute_batch(text).unwrap();
    }

    /// The size of the database, all of which is in one file.
    fn size(&self) -> u64 {
        drop(self.whole());
        let size = fs::metadata(self.database()).unwrap().len();
        assert!(size >= 3 * 4096, "{size}");
        size
    }

    fn truncate(&self, path: &Path, size: u64) {
        OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(size)
            .unwrap();
    }

    fn spoil(&self, path: &Path, from: u64, length: usize) {
        let garbage: Vec<u8> = (0..length).map(|at| (at * 131 % 251) as u8).collect();
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&garbage, from).unwrap();
    }

    fn put_back(&self, copy: &Path) {
        for suffix in ["", "-wal", "-shm"] {
            let name = format!("node.db{suffix}");
            remove(&self.state.join(&name));
            if copy.join(&name).exists() {
                fs::copy(copy.join(&name), self.state.join(&name)).unwrap();
            }
        }
    }
}

fn remove(path: &Path) {
    if path.exists() {
        fs::remove_file(path).unwrap();
    }
}

/// Copies the database as it lies there.
fn copy(state: &Path, to: PathBuf) -> PathBuf {
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(state).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("node.db") {
            fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
    to
}

/// What is done to the state, and what the daemon's report must say then; nothing if it has nothing to say.
type Damage = (&'static str, fn(&Files), &'static str);

const ALL: &[Damage] = &[
    ("nothing", |_| (), ""),
    (
        "database missing",
        |it| remove(&it.database()),
        "its write-ahead log is not",
    ),
    (
        "database and log missing",
        |it| {
            it.size();
            remove(&it.database());
        },
        "missing or empty",
    ),
    (
        "database empty",
        |it| it.truncate(&it.database(), 0),
        "its write-ahead log is not",
    ),
    (
        "database empty, log missing",
        |it| {
            it.size();
            it.truncate(&it.database(), 0);
        },
        "missing or empty",
    ),
    (
        "database without rows",
        |it| it.sql("DELETE FROM sandboxes"),
        "the database did not know it",
    ),
    (
        "database without its table",
        |it| it.sql("DROP TABLE sandboxes"),
        "no table of sandboxes",
    ),
    (
        "database of a header only",
        |it| {
            it.size();
            it.truncate(&it.database(), 100);
        },
        "database set-aside",
    ),
    (
        "database cut to a half",
        |it| it.truncate(&it.database(), it.size() / 2),
        "database set-aside",
    ),
    (
        "database cut by a page",
        |it| it.truncate(&it.database(), it.size() - 4096),
        "database set-aside",
    ),
    (
        "garbage in the first page",
        |it| {
            it.size();
            it.spoil(&it.database(), 0, 4096);
        },
        "database set-aside",
    ),
    (
        "garbage in the middle",
        |it| {
            let middle = it.size() / 2 / 4096 * 4096;
            it.spoil(&it.database(), middle, 4096);
        },
        "database set-aside",
    ),
    (
        "garbage everywhere",
        |it| it.spoil(&it.database(), 0, it.size() as usize),
        "database set-aside",
    ),
    (
        "a row that is no JSON",
        |it| {
            it.sql(&format!(
                "UPDATE sandboxes SET stored = '{{half' WHERE id = '{}'",
                it.on
            ));
        },
        "database set-aside",
    ),
    (
        "a row without its fields",
        |it| it.sql("UPDATE sandboxes SET stored = '{}'"),
        "database set-aside",
    ),
    (
        "a row with a field that nobody knows",
        |it| {
            it.sql("UPDATE sandboxes SET stored = json_set(stored, '$.sandbox.config.new_field', 1)");
        },
        "database set-aside",
    ),
    (
        "a row of another sandbox",
        |it| {
            it.sql("UPDATE sandboxes SET stored = json_set(stored, '$.sandbox.id', 'ffffffffffff')");
        },
        "database set-aside",
    ),
    (
        "an older copy, before the last was made",
        |it| it.put_back(&it.before_late),
        "the database did not know it",
    ),
    (
        "an older copy, before one ended",
        |it| it.put_back(&it.before_over),
        "its record the later number",
    ),
    ("log missing", |it| remove(&it.log()), "the database did not know it"),
    (
        "log cut to a half",
        |it| {
            let size = fs::metadata(it.log()).unwrap().len();
            it.truncate(&it.log(), size / 2);
        },
        "*",
    ),
    (
        "garbage in the log",
        |it| {
            let size = fs::metadata(it.log()).unwrap().len();
            it.spoil(&it.log(), 0, size as usize);
        },
        "*",
    ),
    (
        "garbage in the shared index",
        |it| it.spoil(&it.state.join("node.db-shm"), 0, 32 << 10),
        "",
    ),
    (
        "log of another database",
        |it| {
            it.size();
            let other = it.state.join("other.db");
            let connection = Connection::open(&other).unwrap();
            let make = "PRAGMA journal_mode = WAL; CREATE TABLE sandboxes (id TEXT PRIMARY KEY, stored TEXT NOT NULL); \
                    INSERT INTO sandboxes VALUES ('eeeeeeeeeeee', '{}'); CREATE TABLE more (x)";
            connection.execute_batch(make).unwrap();
            fs::copy(it.state.join("other.db-wal"), it.log()).unwrap();
            drop(connection);
            remove(&other);
        },
        "*",
    ),
    (
        "the database is a directory",
        |it| {
            it.size();
            remove(&it.database());
            fs::create_dir(it.database()).unwrap();
            fs::write(it.database().join("x"), "x").unwrap();
        },
        "it is a directory",
    ),
    (
        "record missing",
        |it| remove(&it.record(&it.on)),
        "written again from the database",
    ),
    (
        "records missing",
        |it| {
            for id in [&it.on, &it.over, &it.late] {
                remove(&it.record(id));
            }
        },
        "written again from the database",
    ),
    ("record empty", |it| it.truncate(&it.record(&it.over), 0), "is damaged"),
    (
        "record garbage",
        |it| it.spoil(&it.record(&it.on), 0, 4096),
        "is damaged",
    ),
    (
        "record of another sandbox",
        |it| {
            fs::copy(it.record(&it.on), it.record(&it.late)).map(drop).unwrap();
        },
        "record.json is of the sandbox",
    ),
    (
        "record older than the database",
        |it| fs::write(it.record(&it.on), &it.old_record).unwrap(),
        "",
    ),
    (
        "database newer than a record",
        |it| {
            it.sql("UPDATE sandboxes SET stored = json_set(stored, '$.generation', 1000)");
        },
        "",
    ),
    (
        "database missing, and a record half written",
        |it| {
            it.size();
            remove(&it.database());
            fs::write(it.record(&it.on).with_extension("new"), "{\"half").unwrap();
        },
        "missing or empty",
    ),
];

/// A world with a sandbox that runs, one that has ended, one that was made later, and a snapshot.
fn world() -> (World, Files) {
    let world = World::new("can be kept");
    let run = |name: &str| {
        let words = [
            "run", "-d", "--boot", "--disk", "16m", "--name", name, "tiny", "--", "sh", "-c", LOOP,
        ];
        done(&world, &words).trim().to_owned()
    };
    let state = world.path("state");
    let (on, over) = (run("on"), run("over"));
    done(&world, &["snapshot", "create", "on", "mine"]);
    end_daemon(&world);
    let before_late = copy(&state, world.path("before-late"));
    let old_record = fs::read(state.join("sandboxes").join(&on).join("record.json")).unwrap();
    done(&world, &["pause", "on"]);
    done(&world, &["unpause", "on"]);
    let late = run("late");
    end_daemon(&world);
    let before_over = copy(&state, world.path("before-over"));
    done(&world, &["stop", "-t", "0", "over"]);
    wait_for_state(&world, "over", "exited");
    fs::write(state.join("sandboxes").join(&over).join("disk"), "precious").unwrap();
    let files = Files {
        state,
        on,
        over,
        late,
        before_late,
        before_over,
        old_record,
    };
    (world, files)
}

/// As `kill -9` does.
fn end_daemon(world: &World) {
    kill(world.daemon().unwrap());
    world.wait_for_no_daemon();
}

fn report(files: &Files) -> String {
    fs::read_to_string(files.state.join("recovery.json")).unwrap_or_default()
}

fn quarantine(files: &Files) -> Vec<PathBuf> {
    let entries = fs::read_dir(files.state.join("quarantine")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn states(world: &World) -> Vec<(String, String)> {
    let listed = json(world, &["ps", "-a"]);
    let field = |sandbox: &serde_json::Value, name: &str| sandbox[name].as_str().unwrap().to_owned();
    let all = listed.as_array().unwrap().iter();
    let mut all: Vec<_> = all
        .map(|sandbox| (field(sandbox, "name"), field(sandbox, "state")))
        .collect();
    all.sort();
    all
}

fn a_damaged_state_loses_nothing() {
    let (world, files) = world();
    let mut vmms = world.vmms();
    vmms.sort_unstable();
    assert_eq!(vmms.len(), 2);
    for (name, damage, tells) in ALL {
        end_daemon(&world);
        remove(&files.state.join("recovery.json"));
        damage(&files);
        let expected = [("late", "running"), ("on", "running"), ("over", "exited")]
            .map(|(name, state)| (name.to_owned(), state.to_owned()));
        assert_eq!(states(&world), expected, "{name}");
        let mut now = world.vmms();
        now.sort_unstable();
        assert_eq!(now, vmms, "{name}");
        for running in ["on", "late"] {
            done(&world, &["exec", running, "true"]);
        }
        let disk = files.state.join("sandboxes").join(&files.over).join("disk");
        assert_eq!(fs::read_to_string(disk).unwrap(), "precious", "{name}");
        assert_eq!(done(&world, &["logs", "over"]), "hello\n", "{name}");
        assert!(done(&world, &["snapshot", "ls"]).contains("mine"), "{name}");
        assert!(quarantine(&files).is_empty(), "{name}: {:?}", quarantine(&files));
        // Both copies are whole again, whatever one of them was.
        for id in [&files.on, &files.over, &files.late] {
            let record: serde_json::Value = serde_json::from_slice(&fs::read(files.record(id)).unwrap()).unwrap();
            assert!(record["generation"].as_u64().unwrap() > 1, "{name}");
        }
        let told = report(&files);
        let said = told.replace("\"outcome\": \"set-aside\"", "database set-aside");
        match *tells {
            "" => assert!(told.is_empty(), "{name}: {told}"),
            // What is left of it is chance.
            "*" => (),
            tells => assert!(said.contains(tells), "{name}: {told}"),
        }
    }
    // A clone of the snapshot, and a start of the one that had ended.
    done(&world, &["clone", "mine"]);
    done(&world, &["start", "over"]);
    let doctor = json_of_doctor(&world);
    assert!(doctor.contains("damaged databases"), "{doctor}");
    let told = refused(&world, &["prune", "--quarantine"]);
    assert!(told.contains("nothing was deleted"), "{told}");
    let deleted = done(&world, &["prune", "--quarantine", "--force"]);
    assert!(deleted.contains("node.db.damaged-"), "{deleted}");
    let left = fs::read_dir(&files.state).unwrap().flatten();
    assert_eq!(
        left.filter(|it| it.file_name().to_string_lossy().contains("damaged"))
            .count(),
        0
    );
    assert_eq!(states(&world).len(), 4);
}

/// What `doctor` says of the state; whether sandboxes can run here is another matter.
fn json_of_doctor(world: &World) -> String {
    let output = world.verb(&["--json", "doctor"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let state = checks.iter().find(|check| check["name"] == "state").unwrap();
    state["found"].as_str().unwrap().to_owned()
}

fn what_has_no_record_is_set_aside() {
    let (world, files) = world();
    end_daemon(&world);
    let record = fs::read(files.record(&files.over)).unwrap();
    remove(&files.record(&files.over));
    files.sql(&format!("DELETE FROM sandboxes WHERE id = '{}'", files.over));
    // A template and a snapshot that nobody can use.
    for nobodys in ["snapshots/nobodys", "templates/nobodys", "sandboxes/nobodys"] {
        fs::create_dir(files.state.join(nobodys)).unwrap();
        fs::write(files.state.join(nobodys).join("memory"), "secret").unwrap();
    }
    // What is there of removals that were interrupted holds nothing that anybody wants.
    for removed in ["snapshots/.1234", "templates/.1234", "sandboxes/.1234", "volumes/.1234"] {
        fs::create_dir(files.state.join(removed)).unwrap();
    }
    assert_eq!(states(&world).len(), 2);
    let set_aside = quarantine(&files);
    assert_eq!(set_aside.len(), 4, "{set_aside:?}");
    let of = |part: &str| {
        set_aside
            .iter()
            .find(|path| path.ends_with(part) || path.to_string_lossy().ends_with(part))
    };
    for kind in ["-sandbox-nobodys", "-snapshot-nobodys", "-template-nobodys"] {
        let place = of(kind).unwrap();
        assert_eq!(fs::read_to_string(place.join("nobodys/memory")).unwrap(), "secret");
        assert!(fs::read_to_string(place.join("why.txt")).unwrap().contains("record"));
    }
    for place in ["snapshots", "templates", "sandboxes", "volumes"] {
        assert!(!files.state.join(place).join(".1234").exists(), "{place}");
    }
    let place = of(&format!("-sandbox-{}", files.over)).unwrap().join(&files.over);
    assert_eq!(fs::read_to_string(place.join("disk")).unwrap(), "precious");
    assert!(report(&files).contains("it has no record.json"), "{}", report(&files));
    // Somebody who knows what it is brings it back.
    end_daemon(&world);
    fs::rename(&place, files.state.join("sandboxes").join(&files.over)).unwrap();
    fs::write(files.record(&files.over), record).unwrap();
    assert_eq!(states(&world).len(), 3);
    assert_eq!(done(&world, &["logs", "over"]), "hello\n");
}

fn a_vmm_without_any_record_is_left_alone() {
    let (world, files) = world();
    let before = world.vmms();
    end_daemon(&world);
    let record = fs::read(files.record(&files.on)).unwrap();
    remove(&files.record(&files.on));
    files.sql(&format!("DELETE FROM sandboxes WHERE id = '{}'", files.on));
    // Twice: the second daemon finds what the first one has left.
    for _ in 0..2 {
        assert_eq!(states(&world).len(), 2);
        assert!(before.iter().all(|&vmm| is_alive(vmm)));
        assert!(report(&files).contains("it works on"), "{}", report(&files));
        assert!(files.state.join("sandboxes").join(&files.on).join("disk").exists());
        end_daemon(&world);
    }
    fs::write(files.record(&files.on), record).unwrap();
    assert_eq!(states(&world).len(), 3);
    done(&world, &["exec", "on", "true"]);
    assert!(before.iter().all(|&vmm| is_alive(vmm)));
    done(&world, &["rm", "-f", "on"]);
    wait_for("its directory to be gone", || {
        (!files.state.join("sandboxes").join(&files.on).exists()).then_some(())
    });
}
