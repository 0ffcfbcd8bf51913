/* The status page at "/": one file, joined from server/web/ by the build, and its policy.
 *
 * It asks /metrics and /v2/models/dropkv/stats of the daemon that served it and nothing else.
 */
#ifndef DKV_SERVER_PAGE_H
#define DKV_SERVER_PAGE_H

#include <stddef.h>

extern const unsigned char dkv_page[]; /* [dkv_page_bytes], HTML in UTF-8 */
extern const size_t dkv_page_bytes;
extern const char dkv_page_policy[]; /* a Content-Security-Policy */

#endif
