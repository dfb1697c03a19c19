//! What threads begin with is a matter of the whole process, so this test is a process of its own.

use std::sync::Mutex;

static SEEN: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

fn first(name: &str) {
    let visible = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
    SEEN.lock().unwrap().push((name.to_owned(), visible.trim().to_owned()));
}

/// The kernel's number of the thread that made this one cannot be asked for, but which threads exist can.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|task| {
            std::fs::read_to_string(task.unwrap().path().join("comm"))
                .unwrap()
                .trim()
                .to_owned()
        })
        .collect()
}

#[test]
fn every_thread_begins_with_what_was_registered_and_none_before() {
    let early = base::thread::spawn("early", 64 << 10, || 1).unwrap();
    assert_eq!(early.join().unwrap(), 1);
    assert!(SEEN.lock().unwrap().is_empty());

    base::thread::begin_with(first).unwrap();
    assert!(base::thread::begin_with(first).is_err());
    // From a thread that is no main thread, as a vCPU's is.
    let inner = base::thread::spawn("outer", 64 << 10, || {
        base::thread::spawn("inner", 64 << 10, || 2).unwrap()
    });
    assert_eq!(inner.unwrap().join().unwrap().join().unwrap(), 2);
    let borrowed = 3;
    let sum = std::thread::scope(|scope| {
        let thread = base::thread::spawn_scoped(scope, "scoped", 64 << 10, || borrowed + 1).unwrap();
        thread.join().unwrap()
    });
    assert_eq!(sum, 4);
    let worker = base::Worker::spawn("worker", 5, |state, _stop| state).unwrap();
    assert_eq!(worker.stop(), Some(5));

    let seen = SEEN.lock().unwrap();
    for name in ["threads", "outer", "inner", "scoped", "worker"] {
        assert!(
            seen.contains(&(name.to_owned(), name.to_owned())),
            "{name} is not in {seen:?}"
        );
    }
    assert!(threads().contains(&"threads".to_owned()));
}
