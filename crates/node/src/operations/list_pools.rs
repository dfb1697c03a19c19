//! What is ready for sandboxes to come: interfaces that were made ahead, and the memory of templates and snapshots as far as it is in the
//! page cache. Nothing is made, and nothing is read from the disk, for somebody who only looks.

use node_api::pool::MOST_MEMORIES;
use node_api::transfer::Kind;
use node_api::{Pool, Snapshot};

use crate::node::Node;

impl Node {
    /// All of it, with what there is of these snapshots: the newest templates and snapshots, as many as one list has.
    pub(crate) fn list_pools(&self, snapshots: Vec<Snapshot>) -> Vec<Pool> {
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let interfaces = self.taps.ready().map(|(ready, size)| Pool::Interfaces {
            ready: number(ready),
            size: number(size),
        });
        let records = self.templates.records();
        let templates = records.iter().map(|record| {
            let place = self.templates.place(record);
            (
                record.template.created_ns,
                Kind::Template,
                record.template.id.clone(),
                place,
            )
        });
        let snapshots = snapshots.into_iter().map(|one| {
            let place = self.snapshots.place(&one.name);
            (one.created_ns, Kind::Snapshot, one.name, place)
        });
        let mut memories: Vec<_> = templates.chain(snapshots).collect();
        memories.sort_by_key(|(created_ns, ..)| std::cmp::Reverse(*created_ns));
        memories.truncate(MOST_MEMORIES);
        let memories = memories.into_iter().map(|(_, kind, name, place)| {
            let found = self.templates.cached.of(place.directory());
            Pool::Memory {
                kind,
                name,
                size: found.size,
                cached: found.cached,
            }
        });
        interfaces.into_iter().chain(memories).collect()
    }
}
