//! Another server of the same directory goes on with what was known.

use super::*;
use crate::Known;

impl Hand {
    /// Its place is taken by another process's server, which has nothing but what this one wrote down.
    fn goes_on(&mut self) -> usize {
        let text = serde_json::to_string(&self.server.known().unwrap()).unwrap();
        let known: Known = serde_json::from_str(&text).unwrap();
        self.goes_on_from(&known).unwrap()
    }

    fn goes_on_from(&mut self, known: &Known) -> Result<usize, crate::Error> {
        let root = open(&self.directory.path().join("shared"));
        self.server = Server::new(root, open(Path::new("/proc/self/fd")), self.server.options).unwrap();
        self.server.know(known)
    }

    fn make_directory(&mut self, parent: u64, name: &[u8]) -> u64 {
        let body = [words(&[0o755, 0]), text(&[name])].concat();
        long(&self.ask(op::MKDIR, parent, &body).unwrap(), 0)
    }
}

#[test]
fn files_keep_their_numbers_and_what_they_were_opened_for() {
    let mut hand = hand();
    let (file, both) = hand.create(b"file", 0o644).unwrap();
    hand.write(both, 0, b"one ").unwrap();
    let appending = hand.open(file, libc::O_WRONLY | libc::O_APPEND).unwrap();
    let reading = hand.open(file, libc::O_RDONLY).unwrap();
    let deep = hand.make_directory(ROOT_ID, b"a");
    let deeper = hand.make_directory(deep, b"\xff b");
    fs::write(hand.shared("a").join("c"), "c").unwrap();
    let listing = long(&hand.ask(op::OPENDIR, ROOT_ID, &[0; 8]).unwrap(), 0);
    assert_eq!(hand.goes_on(), 0);
    assert_eq!(hand.write(appending, 0, b"two"), Ok(3));
    assert_eq!(hand.read(both, 0, 100), Ok(b"one two".to_vec()));
    assert_eq!(hand.read(reading, 4, 100), Ok(b"two".to_vec()));
    assert_eq!(
        hand.write(reading, 0, b"no"),
        Err(Errno::BADF),
        "it was opened to be read"
    );
    assert_eq!(hand.look_up(ROOT_ID, b"file"), Ok(file));
    assert_eq!(hand.look_up(deep, b"\xff b"), Ok(deeper));
    let body = [longs(&[listing, 0]), words(&[4096, 0]), longs(&[0, 0])].concat();
    assert!(hand.ask(op::READDIR, ROOT_ID, &body).unwrap().len() > 4 * 24);
    // What is new gets numbers that nobody had.
    assert!(hand.look_up(deep, b"c").unwrap() > deeper);
    assert!(hand.open(file, libc::O_RDONLY).unwrap() > listing);
    // It was told of once more here than there.
    hand.raw(
        &[
            words(&[48, op::FORGET]),
            longs(&[1, deeper]),
            words(&[0; 4]),
            longs(&[2]),
        ]
        .concat(),
        0,
    );
    assert_eq!(hand.ask(op::GETATTR, deeper, &[0; 16]), Err(Errno::STALE));
}

#[test]
fn a_file_that_is_another_one_is_unknown() {
    let mut hand = hand();
    let (replaced, to_replaced) = hand.create(b"replaced", 0o644).unwrap();
    let (moved, to_moved) = hand.create(b"moved", 0o644).unwrap();
    let (gone, to_gone) = hand.create(b"gone", 0o644).unwrap();
    let (nameless, to_nameless) = hand.create(b"nameless", 0o644).unwrap();
    hand.ask(op::UNLINK, ROOT_ID, &text(&[b"nameless"])).unwrap();
    let known = hand.server.known().unwrap();
    assert!(!known.nodes.contains_key(&nameless) && !known.handles.contains_key(&to_nameless));
    fs::write(hand.shared("new"), "another's").unwrap();
    fs::rename(hand.shared("new"), hand.shared("replaced")).unwrap();
    fs::rename(hand.shared("moved"), hand.shared("elsewhere")).unwrap();
    fs::remove_file(hand.shared("gone")).unwrap();
    assert_eq!(hand.goes_on_from(&known).unwrap(), 6);
    for node in [replaced, moved, gone, nameless] {
        assert_eq!(hand.ask(op::GETATTR, node, &[0; 16]), Err(Errno::STALE));
    }
    for handle in [to_replaced, to_moved, to_gone, to_nameless] {
        assert_eq!(hand.write(handle, 0, b"x"), Err(Errno::BADF));
    }
    assert_eq!(fs::read(hand.shared("replaced")).unwrap(), b"another's");
    // By its name it is found, as what it is now.
    assert!(hand.look_up(ROOT_ID, b"replaced").unwrap() > nameless);
}

#[test]
fn a_file_goes_by_the_name_that_it_was_found_by_last() {
    let mut hand = hand();
    let (node, handle) = hand.create(b"temporary", 0o644).unwrap();
    let body = [longs(&[node]), text(&[b"final"])].concat();
    assert_eq!(long(&hand.ask(op::LINK, ROOT_ID, &body).unwrap(), 0), node);
    hand.ask(op::UNLINK, ROOT_ID, &text(&[b"temporary"])).unwrap();
    hand.write(handle, 0, b"x").unwrap();
    assert_eq!(hand.goes_on(), 0);
    assert_eq!(hand.look_up(ROOT_ID, b"final"), Ok(node));
    assert_eq!(hand.read(handle, 0, 1), Ok(b"x".to_vec()));
}

#[test]
fn more_than_may_be_known_is_refused_and_what_is_read_only_is_not_written() {
    let mut hand = hand();
    let (_, handle) = hand.create(b"file", 0o644).unwrap();
    let mut known = hand.server.known().unwrap();
    hand.server.options.read_only = true;
    assert_eq!(
        hand.goes_on_from(&known).unwrap(),
        1,
        "a file that was open to be written"
    );
    assert_eq!(hand.read(handle, 0, 1), Err(Errno::BADF));
    let node = known.nodes.values().next().unwrap().clone();
    known.nodes = (2..100).map(|id| (id, node.clone())).collect();
    known.last_node = 100;
    assert!(hand.goes_on_from(&known).is_err());
    known.last_node = 5;
    assert!(hand.goes_on_from(&known).is_err());
    // The same file by several numbers is known by one of them.
    known.nodes = (2..5).map(|id| (id, node.clone())).collect();
    known.last_node = u64::MAX;
    assert!(hand.goes_on_from(&known).is_err(), "numbers without an end");
    known.last_node = 4;
    known.handles.clear();
    assert_eq!(hand.goes_on_from(&known).unwrap(), 2);
}
