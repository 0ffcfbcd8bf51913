/* The handlers that the route table names. Each answers one exchange, whose body has been received:
 * it queues a reply, or (infer) suspends the connection and replies when its job has ended.
 *
 * Thread  loop only.
 */
#ifndef DKV_SERVER_HANDLERS_H
#define DKV_SERVER_HANDLERS_H

struct dkv_exchange;

void dkv_handle_server(struct dkv_exchange *exchange);
void dkv_handle_live(struct dkv_exchange *exchange);
void dkv_handle_ready(struct dkv_exchange *exchange);
void dkv_handle_model(struct dkv_exchange *exchange);
void dkv_handle_model_ready(struct dkv_exchange *exchange);
void dkv_handle_config(struct dkv_exchange *exchange);
void dkv_handle_stats(struct dkv_exchange *exchange);
void dkv_handle_stats_all(struct dkv_exchange *exchange);
void dkv_handle_infer(struct dkv_exchange *exchange);
void dkv_handle_index(struct dkv_exchange *exchange);
void dkv_handle_shm_status(struct dkv_exchange *exchange);
void dkv_handle_shm_register(struct dkv_exchange *exchange);
void dkv_handle_shm_unregister(struct dkv_exchange *exchange);
void dkv_handle_page(struct dkv_exchange *exchange);
void dkv_handle_metrics(struct dkv_exchange *exchange);

#endif
