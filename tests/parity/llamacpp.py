"""A thin face on llama.cpp through llama-cpp-python 0.3.36 (in an environment of its own): text by token ids, and its
multimodal library. For check_llamacpp.py and peer.py."""

import ctypes
import time

import numpy as np
from llama_cpp import Llama, llama_cpp, mtmd_cpp

# The multimodal library logs on its own, every picture; kept alive here since C calls it.
QUIET = llama_cpp.llama_log_callback(lambda _level, _text, _arg: None)
mtmd_cpp.mtmd_log_set(QUIET, None)
mtmd_cpp.mtmd_helper_log_set(QUIET, None)


class Text:
    def __init__(self, path, threads, context=1024, flash=False):
        self.llm = Llama(path, n_ctx=context, n_batch=512, verbose=False, n_threads=threads, n_threads_batch=threads, flash_attn=flash)

    def time(self, ids, n_next):
        """Seconds to read ids from an empty cache, and seconds for n_next passes of one token each."""
        self.llm.reset()
        start = time.monotonic()
        self.llm.eval(ids)
        read = time.monotonic()
        for i in ids[:n_next]:
            self.llm.eval([i])
        return read - start, time.monotonic() - read


class Vision:
    """min_tokens, max_tokens: rows of a picture; -1 leaves what the file says."""

    def __init__(self, mmproj, text, threads, min_tokens=-1, max_tokens=-1):
        self.text = text
        p = mtmd_cpp.mtmd_context_params_default()
        p.use_gpu, p.print_timings, p.warmup, p.n_threads = False, False, False, threads
        p.image_min_tokens, p.image_max_tokens = min_tokens, max_tokens
        self.ctx = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), text.llm.model, p)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp does not load {mmproj}")

    def chunks(self, prompt, rgb):
        """prompt holds one marker <__media__>; rgb is u8 [height][width][3]. The result is to be freed."""
        data = np.ascontiguousarray(rgb, dtype=np.uint8)
        bitmap = mtmd_cpp.mtmd_bitmap_init(rgb.shape[1], rgb.shape[0], data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        out = mtmd_cpp.mtmd_input_chunks_init()
        text = mtmd_cpp.mtmd_input_text(prompt.encode(), len(prompt.encode()), False, True)
        failed = mtmd_cpp.mtmd_tokenize(self.ctx, out, ctypes.byref(text), (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap), 1)
        mtmd_cpp.mtmd_bitmap_free(bitmap)
        if failed:
            raise RuntimeError(f"mtmd_tokenize: {failed}")
        return out

    def encode(self, rgb):
        """(rows [n][width], seconds from pixels to rows)."""
        start = time.monotonic()
        chunks = self.chunks("<__media__>", rgb)
        try:
            all_chunks = [mtmd_cpp.mtmd_input_chunks_get(chunks, i) for i in range(mtmd_cpp.mtmd_input_chunks_size(chunks))]
            picture = next(c for c in all_chunks if mtmd_cpp.mtmd_input_chunk_get_type(c) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE)
            if mtmd_cpp.mtmd_encode_chunk(self.ctx, picture):
                raise RuntimeError("mtmd_encode_chunk failed")
            taken = time.monotonic() - start
            n = mtmd_cpp.mtmd_input_chunk_get_n_tokens(picture)
            width = llama_cpp.llama_model_n_embd(self.text.llm.model)
            rows = np.ctypeslib.as_array(mtmd_cpp.mtmd_get_output_embd(self.ctx), (n, width)).copy()
        finally:
            mtmd_cpp.mtmd_input_chunks_free(chunks)
        return rows, taken

    def answer(self, prompt, rgb, limit=32):
        """The greedy continuation of a prompt with one picture, until an end-of-generation token."""
        llm = self.text.llm
        llm.reset()
        llm._ctx.kv_cache_clear()
        chunks, at = self.chunks(prompt, rgb), llama_cpp.llama_pos(0)
        failed = mtmd_cpp.mtmd_helper_eval_chunks(self.ctx, llm._ctx.ctx, chunks, 0, 0, 512, True, ctypes.byref(at))
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        if failed:
            raise RuntimeError("mtmd_helper_eval_chunks failed")
        vocab, ids = llama_cpp.llama_model_get_vocab(llm.model), []
        n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        for i in range(limit):
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1), (n_vocab,))
            best = int(logits.argmax())
            if llama_cpp.llama_vocab_is_eog(vocab, best):
                break
            ids.append(best)
            self.feed(best, at.value + i)
        return llm.detokenize(ids).decode(errors="replace")

    def feed(self, token, position):
        batch = llama_cpp.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.n_seq_id[0] = 1, token, position, 1
        batch.seq_id[0][0], batch.logits[0] = 0, 1
        failed = llama_cpp.llama_decode(self.text.llm._ctx.ctx, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError("llama_decode failed")
