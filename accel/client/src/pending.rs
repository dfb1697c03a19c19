//! What commands that nobody has waited for leave to be done: data to be copied to the application, parts of the arena to be given back,
//! and memory to be freed.
//!
//! The application learns of a command's end by a call that waits or asks. Whatever such a call says, before it returns [`settle`] has
//! brought the data of each command that is complete to where the application reads it. Knows no ring.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use accel_proto::{Span, opencl as calls};
use accel_window::Block;

use crate::bulk::Shape;
use crate::codes::Code;
use crate::connection::Connection;
use crate::event;
use crate::lock;
use crate::object::Object;
use crate::queue;
use crate::regions::Regions;
use crate::svm;

/// So many commands that nobody has waited for are not worth a wait.
const SHORT: usize = 64;

/// Data that goes to the application.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// Where it is in the arena.
    pub(crate) offset: u64,
    /// Where it goes.
    pub(crate) address: usize,
    pub(crate) shape: Shape,
    /// What the application takes the command for, where that is not what the server has carried out.
    pub(crate) kind: Option<u32>,
}

impl Delivery {
    /// Whether it goes to one of so many bytes from an address on.
    pub(crate) fn goes_to(&self, address: usize, length: u64) -> bool {
        let (own, extent) = self.shape.at_address(self.address);
        let begins_within = own.checked_sub(address).is_some_and(|at| (at as u64) < length);
        begins_within || address.checked_sub(own).is_some_and(|at| (at as u64) < extent)
    }
}

/// What a command leaves.
#[derive(Debug)]
pub(crate) struct Left {
    pub(crate) queue: Arc<Object>,
    /// Tells of its end; without one the queue's end is waited for.
    pub(crate) event: Option<Arc<Object>>,
    /// What it has of the arena.
    pub(crate) block: Option<Block>,
    pub(crate) delivery: Option<Delivery>,
    /// Shared virtual memory that is freed.
    pub(crate) frees: Vec<usize>,
}

/// A moment: what was put before it and what was not is told apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

/// All that is left to be done.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Each with its number: how many were put before.
    list: Mutex<Vec<(u64, Left)>>,
    count: AtomicUsize,
    /// How many of them have data that goes to the application.
    deliveries: AtomicUsize,
    next: AtomicU64,
    /// Queues, by their addresses, with commands that nobody has waited for and whose data the application has in the arena; and the number
    /// of the last one.
    in_place: Mutex<BTreeMap<usize, u64>>,
    /// Whoever settles does it alone: what another thread has taken out of the list would seem to be delivered.
    settling: Mutex<()>,
}

impl Pending {
    /// A command was put.
    pub(crate) fn push(&self, left: Left) {
        let mut list = lock(&self.list);
        if left.delivery.is_some() {
            self.deliveries.fetch_add(1, Ordering::SeqCst);
        }
        list.push((self.next.fetch_add(1, Ordering::SeqCst), left));
        self.count.store(list.len(), Ordering::Release);
    }

    /// A command was put whose data the application has where the server puts it.
    pub(crate) fn put_in_place(&self, queue: &Object) {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        lock(&self.in_place).insert(std::ptr::from_ref(queue).addr(), number);
    }

    /// Now, before a call that waits for what was put until now.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.next.load(Ordering::SeqCst))
    }

    /// Whether there is no data that has not gone to the application, and not much else.
    pub(crate) fn is_short(&self) -> bool {
        self.count.load(Ordering::Acquire) < SHORT && lock(&self.in_place).is_empty() && !self.has_deliveries()
    }

    fn has_deliveries(&self) -> bool {
        self.deliveries.load(Ordering::SeqCst) > 0
    }

    /// Whether there is such data that has not gone to the application.
    pub(crate) fn has(&self, is_it: impl Fn(&Delivery) -> bool) -> bool {
        // Not while another thread takes it there.
        let _settling = lock(&self.settling);
        lock(&self.list)
            .iter()
            .filter_map(|(_, left)| left.delivery.as_ref())
            .any(is_it)
    }

    /// Such data goes nowhere.
    pub(crate) fn forget(&self, is_it: impl Fn(&Delivery) -> bool) {
        let _settling = lock(&self.settling);
        self.drop_deliveries(is_it);
    }

    /// An allocation's memory goes, and data that was to go there; not while another thread takes some there. False if there is none.
    pub(crate) fn give_back(&self, regions: &Regions, address: usize) -> bool {
        let _settling = lock(&self.settling);
        let size = regions.give_back(address);
        self.drop_deliveries(|delivery| size.is_some_and(|size| delivery.goes_to(address, size)));
        size.is_some()
    }

    fn drop_deliveries(&self, is_it: impl Fn(&Delivery) -> bool) {
        for (_, left) in lock(&self.list).iter_mut() {
            if left.delivery.take_if(|delivery| is_it(delivery)).is_some() {
                self.deliveries.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn take(&self) -> Vec<(u64, Left)> {
        std::mem::take(&mut *lock(&self.list))
    }

    /// In the order in which they were put.
    fn put_back(&self, mut kept: Vec<(u64, Left)>) {
        let mut list = lock(&self.list);
        kept.append(&mut list);
        *list = kept;
        self.count.store(list.len(), Ordering::Release);
    }
}

/// Does what is left of commands that are complete: those of a queue all of whose commands that were put before a mark have ended, and others
/// by their events.
/// An error if data of one cannot be had: then the server is gone.
pub(crate) fn settle(connection: &'static Connection, finished: Option<(&Object, Mark)>) -> Result<(), Code> {
    if let Some((queue, mark)) = finished {
        let at = std::ptr::from_ref(queue).addr();
        lock(&connection.pending.in_place).retain(|queue, number| *queue != at || *number >= mark.0);
    }
    if connection.pending.count.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let settling = lock(&connection.pending.settling);
    let mut kept = Vec::new();
    let mut over = Vec::new();
    let mut outcome = Ok(());
    // Queues in order with a command that has not ended: those behind it have not ended either.
    let mut behind: Vec<Arc<Object>> = Vec::new();
    for (number, mut left) in connection.pending.take() {
        let has_ended = |(queue, mark): (&Object, Mark)| std::ptr::eq(queue, left.queue.as_ref()) && number < mark.0;
        let of_queue = finished.is_some_and(has_ended);
        // What only holds a part of the arena is not worth a question.
        let asks = left.delivery.is_some() || !left.frees.is_empty();
        let is_behind = behind.iter().any(|queue| Arc::ptr_eq(queue, &left.queue));
        let mut is_complete = of_queue;
        if let Some(event) = left.event.as_ref().filter(|_| !of_queue) {
            is_complete = event::is_known_complete(event);
            if !is_complete && asks && !is_behind {
                let state = event::state(event);
                is_complete = !state.is_ok_and(|state| state > 0);
                if is_complete && state != Ok(0) {
                    // It has failed, or was never made: it brings nothing.
                    connection
                        .pending
                        .deliveries
                        .fetch_sub(usize::from(left.delivery.take().is_some()), Ordering::SeqCst);
                } else if !is_complete && queue::is_in_order(&left.queue) {
                    behind.push(Arc::clone(&left.queue));
                }
            }
        }
        if !is_complete {
            kept.push((number, left));
            continue;
        }
        if let Some(Delivery {
            offset, address, shape, ..
        }) = left.delivery.take()
        {
            let length = shape.extent().unwrap_or_default();
            match connection.fetch(Span { offset, length }) {
                Ok(()) => shape.copy_out(connection, offset, address),
                lost => outcome = lost,
            }
            connection.pending.deliveries.fetch_sub(1, Ordering::SeqCst);
        }
        if let Some(block) = left.block.take() {
            connection.give_back(block);
        }
        over.push(left);
    }
    connection.pending.put_back(kept);
    drop(settling);
    // Last references tell the server of releases, which is nothing to be done under a lock, as little as to tell of what is freed.
    for left in over {
        let context = left.queue.parent::<calls::Context>();
        for address in &left.frees {
            // What is no allocation was none when it was named; who has done that is told by nobody.
            _ = context.map(|context| svm::free(context, *address));
        }
    }
    outcome
}

/// Waits for the queues whose commands hold parts of the arena, so that there is space again.
pub(crate) fn reclaim(connection: &'static Connection) -> Result<(), Code> {
    let mut queues: Vec<Arc<Object>> = Vec::new();
    // Not while another thread has them out of the list.
    let settling = lock(&connection.pending.settling);
    for (_, left) in lock(&connection.pending.list).iter() {
        if !queues.iter().any(|known| Arc::ptr_eq(known, &left.queue)) {
            queues.push(Arc::clone(&left.queue));
        }
    }
    drop(settling);
    queues.iter().try_for_each(|queue| queue::finish_queue(queue))
}

/// Waits until data is there that goes to a part of the application's memory, and for nothing else. What puts a command that reads that
/// part does so first, as the part is read when the command is put, and not when it is carried out.
pub(crate) fn bring(
    connection: &'static Connection,
    address: usize,
    length: u64,
    is_it: impl Fn(&Delivery) -> bool,
) -> Result<(), Code> {
    if !connection.pending.has_deliveries() {
        return Ok(());
    }
    let goes_there = |delivery: &Delivery| delivery.goes_to(address, length) && is_it(delivery);
    // Not while another thread has them out of the list.
    let settling = lock(&connection.pending.settling);
    let events: Vec<_> = lock(&connection.pending.list)
        .iter()
        .filter(|(_, left)| left.delivery.as_ref().is_some_and(goes_there))
        .filter_map(|(_, left)| left.event.clone())
        .collect();
    drop(settling);
    if events.is_empty() {
        return Ok(());
    }
    for event in &events {
        // One that has failed brings nothing, which is told by its own queue.
        _ = event::wait_for(connection, event);
    }
    settle(connection, None)
}

/// Whether commands of a queue have left anything.
pub(crate) fn has_left(connection: &Connection, queue: &Object) -> bool {
    let _settling = lock(&connection.pending.settling);
    let list = lock(&connection.pending.list);
    list.iter().any(|(_, left)| std::ptr::eq(left.queue.as_ref(), queue))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::regions;

    #[test]
    fn memory_does_not_go_while_somebody_may_copy_to_it() {
        let (pending, regions, at) = (Pending::default(), Regions::default(), regions::unused());
        assert!(regions.reserve(at, 5000));
        std::thread::scope(|scope| {
            let settling = lock(&pending.settling);
            let freeing = scope.spawn(|| pending.give_back(&regions, at));
            std::thread::sleep(Duration::from_millis(50));
            assert!(regions.has(at, 5000) && !freeing.is_finished());
            drop(settling);
            assert!(freeing.join().unwrap());
        });
        assert!(!regions.has(at, 1) && !pending.give_back(&regions, at));
    }
}
