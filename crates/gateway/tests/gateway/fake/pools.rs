//! What the node without machines has ready: by what there is, as far as tests have to tell one from the other.

use base::ByteSize;
use node_api::Pool;
use node_api::message::Item;
use node_api::transfer::Kind;

use super::{Kept, templates};

/// All of it, as far as it is there for who asks.
pub(super) fn list(kept: &Kept) -> Vec<Item> {
    let mib = |number| ByteSize::mib(number).bytes();
    let memory = |kind, name: &str, cached| {
        Item::Pool(Pool::Memory {
            kind,
            name: name.to_owned(),
            size: mib(100),
            cached,
        })
    };
    let interfaces = Item::Pool(Pool::Interfaces { ready: 5, size: 8 });
    let of_node = templates()
        .into_iter()
        .enumerate()
        .map(|(number, one)| memory(Kind::Template, &one.id, Some(mib(if number == 0 { 75 } else { 0 }))));
    // One that the daemon has made by itself.
    let by_itself = [memory(Kind::Template, &"aa".repeat(32), Some(0))];
    let snapshots = kept.snapshots.values().filter(|one| kept.owns(&one.config));
    let snapshots = snapshots.map(|one| memory(Kind::Snapshot, &one.name, None));
    [interfaces]
        .into_iter()
        .chain(of_node)
        .chain(by_itself)
        .chain(snapshots)
        .collect()
}
